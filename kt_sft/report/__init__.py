"""What a run says of itself: logs, pictures, the model card."""
