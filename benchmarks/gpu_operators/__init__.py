"""Operators that are timed on a GPU one by one."""
