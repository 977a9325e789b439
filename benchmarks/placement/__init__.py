"""Workloads of the placement benchmark, and the process that runs one of them."""
