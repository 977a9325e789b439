"""A training step of one rank on one GPU, run in several ways."""
