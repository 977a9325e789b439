"""Run a captured step on one rank, with peers that are imagined.

A peer holds what this rank holds, times a factor of its own and of the group, so that what is exchanged
depends on who takes part, and what a real world says of exchanges holds here too: a gather of
joined tensors is the gathers joined, a reduction of a sum the sum of reductions. Integers are the
same on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from gt_passes.analysis.host_copies import OFFLOAD, RELOAD, WAIT_COPY

functional = torch.ops._c10d_functional


def random_inputs(graph_module: GraphModule, *, seed: int = 0) -> list[Any]:
    """Values for the inputs of a captured step: small numbers, and token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(node.meta["val"], generator) for node in _inputs(graph_module)]


def run_with_peers(graph_module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return what a step computes from copies of its inputs, and what it leaves in them.

    What it leaves in constants follows; they are then as before.
    """
    constants = [each for _, each in sorted(graph_module.named_buffers())]
    held = [each.clone() for each in constants]
    own = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = _OfImaginedWorld(graph_module, garbage_collect_values=False).run(*own)
    results = [each.clone() for each in (*pytree.tree_leaves(outputs), *own, *constants)]
    for each, before in zip(constants, held, strict=True):
        each.copy_(before)
    return results


def are_equal_bits(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two runs gave the same: every bit, and every shape and type."""
    return len(one) == len(other) and all(map(_equal, one, other))


class _OfImaginedWorld(Interpreter):
    def __init__(self, graph_module: GraphModule, *, garbage_collect_values: bool) -> None:
        super().__init__(graph_module, garbage_collect_values=garbage_collect_values)
        self._in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _start_copy(self, source: torch.Tensor, *_: Any) -> torch.Tensor:
        """A copy that has brought nothing yet."""
        copy = torch.full_like(source, float("nan"))
        self._in_flight[copy.data_ptr()] = (copy, source)
        return copy

    def _wait_copy(self, copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy as late as may be; memory that the wait does not name may be another's by then."""
        started, copied = self._in_flight.pop(copy.data_ptr(), (copy, None))
        if copied is not None and copied.data_ptr() == source.data_ptr():
            started.copy_(copied)
        return copy

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (OFFLOAD, RELOAD):
            return self._start_copy(*args, **kwargs)
        if target is WAIT_COPY:
            return self._wait_copy(*args, **kwargs)
        exchange = _EXCHANGES.get(target)
        return super().call_function(target if exchange is None else exchange, args, kwargs)


def _inputs(graph_module: GraphModule) -> list[Node]:
    return graph_module.graph.find_nodes(op="placeholder")


def _random(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).mul(0.5).to(value.dtype)
    if value.dtype == torch.int32:  # numbers of blocks, and their indices
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.randint(0, 8, value.shape, generator=generator).to(value.dtype)


def _of_peers(x: torch.Tensor, group_name: Any, size: int) -> list[torch.Tensor]:
    """What the members of a group hold, of which this rank is the first and holds ``x``."""
    name = group_name if isinstance(group_name, str) else group_name.group_name
    if not x.is_floating_point():
        return [x] * size
    # Of a million, so that groups by other names have other factors.
    of_group = zlib.crc32(name.encode()) % 2**20 / 2**20
    return [x, *(x * (1 + (rank + of_group) / 8) for rank in range(1, size))]


def _gather(x: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    return torch.cat(_of_peers(x, group_name, group_size))


def _reduce(parts: list[torch.Tensor], how: str) -> torch.Tensor:
    each = torch.stack(parts)
    if how in ("max", "min"):
        return each.amax(0) if how == "max" else each.amin(0)
    total = each.sum(0, dtype=each.dtype)
    return total if how == "sum" else total / len(parts)


def _all_reduce(x: torch.Tensor, how: str, group_name: Any) -> torch.Tensor:
    return _reduce(_of_peers(x, group_name, 2), how)


def _reduce_scatter(x: torch.Tensor, how: str, group_size: int, group_name: Any) -> torch.Tensor:
    return _reduce(_of_peers(x, group_name, group_size), how).chunk(group_size)[0].clone()


def _all_to_all(
    x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group_name: Any
) -> torch.Tensor:
    peers = _of_peers(x, group_name, len(received))
    whole = torch.cat([_rows(*each) for each in zip(peers, received, strict=True)])
    of_sent = sum(index * count for index, count in enumerate(sent)) / 1024
    return whole * (1 + of_sent) if x.is_floating_point() else whole


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows of a tensor, over again if it has too few."""
    if len(x) == 0:
        return x.new_zeros((count, *x.shape[1:]))
    return x.repeat(count // len(x) + 1, *[1] * (x.dim() - 1))[:count]


_EXCHANGES: dict[Any, Callable[..., Any]] = {
    functional.all_gather_into_tensor.default: _gather,
    functional.all_reduce.default: _all_reduce,
    functional.reduce_scatter_tensor.default: _reduce_scatter,
    functional.all_to_all_single.default: _all_to_all,
    functional.wait_tensor.default: lambda x: x,
}


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))
