"""A module's forward and backward as a joint graph, and the two graphs that it is cut into."""
