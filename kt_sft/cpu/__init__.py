"""What is beside the experts, in runs on the CPU."""
