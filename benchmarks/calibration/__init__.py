"""Measuring the constants of the cost model that are assumptions in the published hardware file."""
