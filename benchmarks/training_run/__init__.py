"""A whole training run of a Hugging Face model: its text, its model, its loop."""
