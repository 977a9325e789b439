"""Passes on tensor parallelism's matrix products and the collectives next to them."""
