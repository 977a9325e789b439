"""Splitting a model into pipeline stages; imports torch alone, so that any trainer can take it."""
