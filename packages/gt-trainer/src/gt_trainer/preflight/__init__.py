"""Everything that refuses a run before it starts."""
