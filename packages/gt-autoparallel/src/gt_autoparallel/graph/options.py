"""What a node may do on a mesh: the contract between operator rules and everything after them.

A rule speaks of one mesh axis at a time: an ``AxisOption`` says in which placement each operand
comes and each output leaves, such that running the operator on every rank's shards (with sizes in
its arguments adapted) gives the right shards. Axes are independent, so a node's options on a mesh
are the combinations of one axis option for each axis that cut every tensor evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch.distributed.tensor import Placement

from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec


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


class NodeOptions(Protocol):
    """From a node to its options; ``gt_autoparallel.rules.node_options`` is the one in use."""

    def __call__(
        self, node: PlacementNode, operands: tuple[TensorSpec, ...], mesh: MeshShape
    ) -> tuple[NodeOption, ...]:
        """Every option of ``node``, without duplicates, in a fixed order.

        Args:
            node: an operator.
            operands: the global tensors of its operands, in their order.
            mesh: sizes of the axes.

        Raises:
            UnsupportedOperatorError: no rule knows the operator.
        """
        ...
