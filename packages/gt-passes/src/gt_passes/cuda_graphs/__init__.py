"""Recording the pieces of a graph as CUDA graphs, and replaying them."""
