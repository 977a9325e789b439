"""Checkpoints that say whether they are intact, and are read without running what is in them."""
