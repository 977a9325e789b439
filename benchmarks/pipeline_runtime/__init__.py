"""Stages that compute nothing, for three pipeline runtimes."""
