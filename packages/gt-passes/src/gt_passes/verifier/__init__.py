"""Everything that judges a graph: after each pass what changed, at the end all of it, and between ranks."""
