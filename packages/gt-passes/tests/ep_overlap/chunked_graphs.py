"""Small graphs with chunks annotated by hand, as a producer of chunks leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pass_graphs import capture, collectives
from torch.fx import GraphModule

from gt_config.node_keys import (
    ChunkAnnotation,
    ChunkRole,
    Direction,
    EpExchangeAnnotation,
    EpExchangeKind,
)
from gt_trace.annotate import annotate, phase

GROUP = "ep"
ROOT = "layers.1.moe"


@contextmanager
def chunk(
    chunk_id: int | None,
    direction: Direction = "forward",
    *,
    root: str = ROOT,
    role: ChunkRole = "body",
) -> Iterator[None]:
    """Nodes traced inside belong to a chunk; to a boundary of the region where it is None."""
    with (
        phase(direction),
        annotate(
            ChunkAnnotation(
                region_root=root,
                role=role,
                chunk_id=chunk_id,
                direction=direction,
                producer="graph",
            )
        ),
    ):
        yield


def exchanged(
    x: torch.Tensor,
    *,
    group: str = GROUP,
    num_ranks: int = 2,
    kind: EpExchangeKind = "token_exchange",
) -> torch.Tensor:
    """Rows given to all ranks of a group in equal parts, and as many received."""
    splits = [x.shape[0] // num_ranks] * num_ranks
    with annotate(EpExchangeAnnotation(kind=kind)):
        return collectives.wait_tensor(collectives.all_to_all_single(x, splits, splits, group))


def forward_of_chunk(x: torch.Tensor, *, group: str = GROUP, num_ranks: int = 2) -> torch.Tensor:
    """Routing (cos), exchange, experts (exp), exchange, combination (sin)."""
    there = exchanged(x.cos(), group=group, num_ranks=num_ranks)
    back = exchanged(there.exp(), group=group, num_ranks=num_ranks)
    return back.sin()


def forward_region(
    x: torch.Tensor,
    num_chunks: int,
    *,
    root: str = ROOT,
    of_chunk: Callable[[torch.Tensor], torch.Tensor] = forward_of_chunk,
) -> torch.Tensor:
    """A whole value split in chunks of rows, each taken through ``of_chunk``, and joined."""
    with chunk(None, root=root, role="split_boundary"):
        parts = torch.split(x, x.shape[0] // num_chunks)
    done = []
    for number, part in enumerate(parts):
        with chunk(number, root=root):
            done.append(of_chunk(part))
    with chunk(None, root=root, role="materialization"):
        return torch.cat(done)


def capture_forward(num_chunks: int = 2) -> GraphModule:
    """One region forward, chunk after chunk."""
    return capture(lambda x: forward_region(x, num_chunks), torch.ones(4 * num_chunks, 2))


def backward_region(
    gradient: torch.Tensor,
    saved: torch.Tensor,
    num_chunks: int,
    *,
    root: str = ROOT,
    group: str = GROUP,
    num_ranks: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a region's input and weight, each chunk after the other from the first."""
    rows = gradient.shape[0] // num_chunks
    with chunk(None, "backward", root=root, role="split_boundary"):
        parts = torch.split(gradient, rows)
    inputs, weights = [], []
    for number, part in enumerate(parts):
        with chunk(number, "backward", root=root):
            of_experts = exchanged(part.cos(), group=group, num_ranks=num_ranks)
            weights.append(saved.t() @ of_experts)
            of_input = exchanged(of_experts.exp(), group=group, num_ranks=num_ranks)
            inputs.append(of_input.sin())
    with chunk(None, "backward", root=root, role="materialization"):
        whole = torch.cat(inputs)
        weight = weights[-1]
        for other in reversed(weights[:-1]):
            weight = weight + other
    return whole, weight


def step(
    x: torch.Tensor,
    gradient: torch.Tensor,
    num_chunks: int,
    *,
    group: str = GROUP,
    num_ranks: int = 2,
) -> tuple[torch.Tensor, ...]:
    """A region forward and the same region backward."""
    y = forward_region(
        x,
        num_chunks,
        of_chunk=lambda part: forward_of_chunk(part, group=group, num_ranks=num_ranks),
    )
    saved = x[: x.shape[0] // num_chunks] * 2
    return y, *backward_region(gradient, saved, num_chunks, group=group, num_ranks=num_ranks)


def capture_step(num_chunks: int = 2) -> GraphModule:
    """``step`` on eight rows."""
    rows = 4 * num_chunks
    return capture(lambda x, dy: step(x, dy, num_chunks), torch.ones(rows, 2), torch.ones(rows, 2))


def order(graph_module: GraphModule) -> str:
    """What runs, in order, in words: ``cos0`` is the cosine of chunk 0."""
    words = []
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        custom = node.meta.get("custom", {}).get("gt.chunk", {})
        number = "" if custom.get("chunk_id") is None else custom["chunk_id"]
        name = str(node.target).split(".")[-2] if "." in str(node.target) else "item"
        words.append(f"{_SHORT.get(name, name)}{number}")
    return " ".join(word for word in words if not word.startswith("item"))


_SHORT = {"all_to_all_single": "launch", "wait_tensor": "wait"}
