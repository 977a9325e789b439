"""Solver-chosen placement of tensors and operators. Empty in this version.

Planned for part 5 of Graph Trainer: DTensor placement options per graph node, an exact LP/MILP
solved in process by HiGHS under a memory budget, an audit of every plan, and applying a plan.
The package exists now so that its name, its place in the layering and its release process are
settled before its code. See docs/architecture.md in the repository.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
