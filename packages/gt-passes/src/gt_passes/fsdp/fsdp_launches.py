"""The FSDP collectives of a graph, found by their annotation, and the blocks they belong to.

What bucketing, prefetch and late waits share. Nothing here looks at how a parameter is cast, padded
or laid out: a collective and its wait are replaced or moved, and what stands around them stays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from gt_config.node_keys import Direction, FsdpCollectiveKind
from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.contract import Refusal
from gt_trace.node_metadata import phase_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpLaunch:
    """One FSDP collective that is waited for once."""

    launch: Node
    wait: Node
    kind: FsdpCollectiveKind
    parameter_names: tuple[str, ...]
    direction: Direction
    """The loss counts as forward."""

    block: str
    """The transformer block of its parameters, as ``layers.7``. Parameters outside of blocks form
    two blocks: ``before layers`` and ``after layers``, in the order of the direction."""

    position: int
    """In execution order, among all nodes of the graph."""

    @property
    def input(self) -> Node:
        """What is given to the collective."""
        source = self.launch.args[0]
        assert isinstance(source, Node)
        return source

    @property
    def options(self) -> tuple[object, ...]:
        """Its arguments after the tensor: reduction, number of ranks, group."""
        return tuple(self.launch.args[1:])

    @property
    def input_value(self) -> torch.Tensor:
        """The fake value of its input."""
        return _tensor(self.input)

    @property
    def output_value(self) -> torch.Tensor:
        """The fake value of its result."""
        return _tensor(self.wait)

    @property
    def num_bytes(self) -> int:
        """The larger of what it takes and gives: the parameter, or its gradient, when whole."""
        values = (self.input_value, self.output_value)
        return max(value.numel() * value.element_size() for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpLaunches:
    """The FSDP collectives of a graph, in execution order."""

    launches: tuple[FsdpLaunch, ...]
    refusals: tuple[Refusal, ...]
    """Annotated collectives that are not one launch and one wait on plain tensors."""


def find_fsdp_launches(
    graph: Graph, *, targets: Collection[OpOverload], layers: LayerNames
) -> FsdpLaunches:
    """Find the annotated collectives that call one of ``targets``.

    Args:
        graph: in execution order.
        targets: functional collectives, such as ``_c10d_functional.all_gather_into_tensor``.
        layers: which parameters belong to which block.
    """
    launches: list[FsdpLaunch] = []
    refusals: list[Refusal] = []
    begun: set[Direction] = set()  # directions in which a block has been seen
    for position, node in enumerate(graph.nodes):
        if not is_collective(node):
            continue
        annotation = fsdp_collective(node)
        if annotation is None:
            continue
        direction: Direction = "backward" if phase_of(node) == "backward" else "forward"
        block = layers.layer_of_name(annotation.parameter_names[0])
        if block is not None:
            begun.add(direction)
        else:
            block = "after layers" if direction in begun else "before layers"
        if node.target not in targets:
            continue
        reason = _reason_against(node)
        if reason is not None:
            refusals.append(Refusal(node_name=node.name, reason=reason))
            continue
        (wait,) = node.users
        launches.append(
            FsdpLaunch(
                launch=node,
                wait=wait,
                kind=annotation.kind,
                parameter_names=annotation.parameter_names,
                direction=direction,
                block=block,
                position=position,
            )
        )
    return FsdpLaunches(launches=tuple(launches), refusals=tuple(refusals))


def chain_levels(graph: Graph) -> dict[Node, int]:
    """How many FSDP collectives each FSDP node waits for, one after another.

    A parameter that two mesh axes shard is gathered along one, then along the other.
    """
    levels: dict[Node, int] = {}
    for node in graph.nodes:
        if fsdp_collective(node) is not None:
            before = max((levels.get(source, 0) for source in node.all_input_nodes), default=0)
            levels[node] = before + is_wait(node)
    return levels


def waits_to_come(graph: Graph) -> dict[Node, int]:
    """How many FSDP collectives are waited for from each FSDP node on, one after another.

    From the launch of a parameter's only gathering that is one; from that of the first of two, two.
    """
    to_come: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if fsdp_collective(node) is not None:
            behind = (to_come[user] + is_wait(user) for user in node.users if user in to_come)
            to_come[node] = max(behind, default=0)
    return to_come


def _reason_against(node: Node) -> str | None:
    users = list(node.users)
    if len(users) != 1 or not is_wait(users[0]):
        return "its result is not read by one wait alone"
    for value in map(value_of, (*node.all_input_nodes, node)):
        if not isinstance(value, torch.Tensor):
            return "it has no fake value"
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            return "its size depends on data"
        if not value.is_contiguous():
            return "its input is not contiguous"
    return None


def _tensor(node: Node) -> torch.Tensor:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)  # find_fsdp_launches has refused the others
    return value
