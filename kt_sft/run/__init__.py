"""A training run from its first step to its last, and what interrupts it."""
