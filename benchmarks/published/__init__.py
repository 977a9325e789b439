"""One published run, simulated in a process of its own."""
