"""The experts as one operator of autograd, and what a step of it needs."""
