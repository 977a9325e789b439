"""Captures in files: a readable container with an identity in front, and a folder to share them."""
