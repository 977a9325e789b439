"""Regions of a graph, or all of it, handed to Inductor."""
