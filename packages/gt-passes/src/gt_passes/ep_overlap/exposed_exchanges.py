"""Which token exchanges of a graph have nothing of another chunk between launch and wait."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gt_config.node_keys import ChunkAnnotation, Direction
from gt_passes._torch_internals import HigherOrderOperator, OpOverload, value_of
from gt_passes.analysis.collectives import is_collective, is_wait, waits_of
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.operator_effects import is_only_a_view, reads_only_metadata
from gt_passes.analysis.order_constraints import is_host_read
from gt_passes.analysis.outlined_region import region_of
from gt_passes.ep_overlap.exchange_operators import (
    is_exchange_launch,
    is_exchange_wait,
    is_token_exchange,
)
from gt_trace.node_metadata import read_annotation

_READ_SHAPES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
"""Operators that are given a tensor and read no element of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedExchange:
    """A token exchange behind whose launch no other chunk computes before its wait."""

    region_root: str
    direction: Direction
    chunk_id: int
    launch_name: str
    wait_name: str

    def __str__(self) -> str:
        return (
            f"{self.region_root} {self.direction}: between {self.launch_name} of chunk "
            f"{self.chunk_id} and {self.wait_name} no other chunk computes"
        )


def exposed_exchanges(graph_module: GraphModule) -> tuple[ExposedExchange, ...]:
    """The token exchanges with no compute of another chunk between launch and wait.

    Compute is an operator that makes a tensor of tensors on the device: no view, no collective, no
    wait, no reading of the host, nothing that only allocates or fills. A chunk of another region in
    the same direction counts too, as where blocks chain; what belongs to no chunk does not. A
    region counts as the operators that it was made of.

    Args:
        graph_module: a graph with chunk annotations.

    Returns:
        In the order of their launches; empty when something stands behind every one.
    """
    return tuple(
        ExposedExchange(
            region_root=own.region_root,
            direction=own.direction,
            chunk_id=own.chunk_id,
            launch_name=launch.name,
            wait_name=wait.name,
        )
        for launch, wait, own, between in _flights(graph_module)
        if own.chunk_id is not None and not any(_computes_for_another(n, own) for n in between)
    )


def interrupted_exchanges(graph_module: GraphModule) -> tuple[tuple[str, str], ...]:
    """FSDP collectives that are launched while a token exchange is in flight.

    Returns:
        Pairs of names: of the launch of the exchange, and of that of the FSDP collective.
    """
    return tuple(
        (launch.name, node.name)
        for launch, _, _, between in _flights(graph_module)
        for node in between
        if is_collective(node) and fsdp_collective(node) is not None
    )


def _flights(
    graph_module: GraphModule,
) -> list[tuple[Node, Node, ChunkAnnotation, list[Node]]]:
    """Every token exchange of a chunk: launch, first wait, annotation, and what stands between."""
    nodes = list(graph_module.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    flights = []
    for launch in nodes:
        if not is_exchange_launch(launch) or not is_token_exchange(launch):
            continue
        own = read_annotation(launch, ChunkAnnotation)
        waits = sorted(waits_of(launch), key=position.__getitem__)
        if own is None or not waits:
            continue
        between = nodes[position[launch] + 1 : position[waits[0]]]
        flights.append((launch, waits[0], own, between))
    return flights


def _computes_for_another(node: Node, own: ChunkAnnotation) -> bool:
    region = region_of(node)
    if region is not None:
        return any(_computes_for_another(inner, own) for inner in region.body.graph.nodes)
    other = read_annotation(node, ChunkAnnotation)
    if other is None or other.role != "body" or other.direction != own.direction:
        return False
    return other.chunk_id != own.chunk_id and is_compute(node)


def is_compute(node: Node) -> bool:
    """Whether a node makes a tensor of tensors on the device.

    No view, collective, wait or host read; nor what only allocates or fills, behind which no
    exchange could hide.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if region_of(node) is not None or isinstance(node.target, HigherOrderOperator):
        return True
    if not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node):
        return False
    if is_exchange_launch(node) or is_exchange_wait(node) or is_host_read(node):
        return False
    value = value_of(node)
    makes_tensor = isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(v, torch.Tensor) for v in value)
    )
    if not makes_tensor or is_only_a_view(node) or reads_only_metadata(node):
        return False
    reads_tensor = any(isinstance(value_of(n), torch.Tensor) for n in node.all_input_nodes)
    return reads_tensor and node.target._schema.name not in _READ_SHAPES_ONLY
