"""What the benchmark of EP overlap draws of a simulated step, and the bound it compares with."""
