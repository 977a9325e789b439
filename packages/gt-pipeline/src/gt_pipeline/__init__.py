"""Pipeline parallelism over captured stage graphs. Empty in this version.

Planned for part 4 of Graph Trainer: `gt_pipeline.split` (split a model into stages; torch alone),
schedule building, graph stages with one graph per schedule action, and `GraphPPRunner`.
The package exists now so that its name, its place in the layering and its release process are
settled before its code. See docs/architecture.md in the repository.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
