"""Everything that judges a graph: each pass alone, all of them together, and the ranks together."""
