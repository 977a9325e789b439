"""Passes that remove what changes nothing."""
