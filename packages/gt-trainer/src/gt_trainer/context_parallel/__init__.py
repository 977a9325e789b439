"""Ranks that share a sequence: which tokens each has, its masks, and attention to all others'."""
