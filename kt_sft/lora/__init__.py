"""LoRA on experts, as peft has it."""
