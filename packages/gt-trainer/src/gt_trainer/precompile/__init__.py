"""Stored graphs for ranks that do not exist: where they stand, and what each captures."""
