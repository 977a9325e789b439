"""A run on paper: built, captured and simulated without ranks, weights or data."""
