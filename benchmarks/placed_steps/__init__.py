"""Which steps the one of a solver is judged by."""
