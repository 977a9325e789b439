"""What a node may do on a mesh: the contract between operator rules and everything after them.

A rule speaks of one mesh axis at a time: an ``AxisOption`` says in which placement each operand
comes and each output leaves, such that running the operator on every rank's shards (with sizes in
its arguments adapted) gives the right shards. Axes are independent, so a node's options on a mesh
are the combinations of one axis option for each axis that cut every tensor evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Placement

from gt_autoparallel.graph.layouts import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisOption:
    """One way to run a node along one mesh axis."""

    operands: tuple[Placement, ...]
    """Placement in which each operand must come, in the order of ``PlacementNode.operands``."""

    outputs: tuple[Placement | None, ...]
    """Placement in which each output leaves; None where there is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOption:
    """One way to run a node on the whole mesh."""

    operands: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    axis_options: tuple[AxisOption, ...] = ()
    """The option of each axis from which it was made; empty for kinds that no rule makes."""

    def output(self, index: int = 0) -> Layout:
        """The layout of the ``index``-th output, which is a tensor."""
        layout = self.outputs[index]
        assert layout is not None, "a tensor has a layout"
        return layout
