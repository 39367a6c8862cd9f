"""From a checkpoint to packed experts in CPU memory."""
