"""The LLaMA-Factory seam."""
