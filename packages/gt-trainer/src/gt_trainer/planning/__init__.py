"""``gt-train plan``: which recipe for this model on this cluster, and what will it do."""
