"""Training mixture-of-experts models with their experts in CPU memory, through stock transformers,
peft and LLaMA-Factory.

Importing this package imports nothing heavy: `kt_sft.bootstrap` runs inside every `import torch`.
"""
