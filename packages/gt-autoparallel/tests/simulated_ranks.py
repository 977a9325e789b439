"""Runs an operator on every simulated rank's shards and puts the results together again.

What a rule claims is that this gives what the operator gives on the global tensors. Values are
small integers in float64, so that sums in any order are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gt_autoparallel.graph.function_graph import FunctionGraph
from gt_autoparallel.graph.layouts import Layout, MeshShape, local_shape, short_text
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec, Value
from gt_autoparallel.rules import local_call, node_options

_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 5e-2,
}
"""Relative; integers and truth values are equal."""

Locals = dict[tuple[int, ...], torch.Tensor]
"""By coordinate of the rank."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call of an operator on global tensors."""

    operator: str
    """Full name, like ``aten.mm.default``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: bool
    """Whether results must be equal, and not only close."""

    compared: tuple[int, ...] | None
    """Outputs whose values are compared; None for all. Of the others only shapes are."""

    stand_in: Callable[..., Any] | None
    """Computes the same as the operator, where this machine has no kernel for it."""

    @property
    def target(self) -> Any:
        target: Any = torch.ops
        for part in self.operator.split("."):
            target = getattr(target, part)
        return target

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The outputs of a function, with the operator in it replaced by its stand-in."""
        replaced = nullcontext() if self.stand_in is None else _Replaced(self.target, self.stand_in)
        args, kwargs = pytree.tree_map(_as_function, (args, kwargs))
        with replaced:
            return tuple(pytree.tree_leaves(function(*args, **kwargs)))


def _as_function(leaf: Any) -> Any:
    return leaf.graph_module() if isinstance(leaf, FunctionGraph) else leaf


class _Replaced(TorchDispatchMode):
    def __init__(self, target: Any, stand_in: Callable[..., Any]) -> None:
        super().__init__()
        self._target, self._stand_in = target, stand_in

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        chosen = self._stand_in if func is self._target else func
        return chosen(*args, **(kwargs or {}))


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=tensor.dtype)


def node_of(sample: Sample) -> tuple[PlacementNode, tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """The sample as a node, its operands, and what it gives on global tensors."""
    operands: list[torch.Tensor] = []

    def numbered(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        operands.append(leaf)
        return Value(len(operands) - 1)

    args, kwargs = pytree.tree_map(numbered, (sample.args, sample.kwargs))
    expected = sample.run(sample.target, sample.args, sample.kwargs)
    node = PlacementNode(
        index=len(operands),
        name=sample.operator,
        kind="operator",
        target=sample.target,
        args=args,
        kwargs=kwargs,
        outputs=tuple(
            spec_of(output) if isinstance(output, torch.Tensor) else None for output in expected
        ),
    )
    return node, tuple(operands), expected


def options_of(sample: Sample, mesh: MeshShape) -> tuple[NodeOption, ...]:
    node, operands, _ = node_of(sample)
    return node_options(node, tuple(spec_of(operand) for operand in operands), mesh)


def wrong_options(sample: Sample, mesh: MeshShape, *, at_most: int | None = None) -> Iterator[str]:
    """Every option (or some, evenly spread) whose results differ from the global ones."""
    node, operands, expected = node_of(sample)
    specs = tuple(spec_of(operand) for operand in operands)
    options = node_options(node, specs, mesh)
    step = 1 if at_most is None else max(1, len(options) // at_most)
    for option in options[::step]:
        inputs = [
            distributed(operand, layout, mesh)
            for operand, layout in zip(operands, option.operands, strict=True)
        ]
        by_rank = {
            coordinate: _run_on_rank(sample, node, option, specs, inputs, mesh, coordinate)
            for coordinate in itertools.product(*(range(size) for size in mesh.sizes))
        }
        for index, whole in enumerate(expected):
            parts = {coordinate: outputs[index] for coordinate, outputs in by_rank.items()}
            problem = _difference(sample, index, whole, option.outputs[index], parts, mesh)
            if problem is not None:
                yield f"{sample.operator} [{option_text(option)}] output {index}: {problem}"


def _run_on_rank(
    sample: Sample,
    node: PlacementNode,
    option: NodeOption,
    specs: tuple[TensorSpec, ...],
    inputs: Sequence[Locals],
    mesh: MeshShape,
    coordinate: tuple[int, ...],
) -> tuple[Any, ...]:
    local = local_call(node, option, specs, mesh, coordinate=coordinate)

    def shard_of(leaf: Any) -> Any:
        return inputs[leaf.node][coordinate] if isinstance(leaf, Value) else leaf

    args, kwargs = pytree.tree_map(shard_of, (local.args, local.kwargs))
    outputs = sample.run(local.function, args, kwargs)
    assert len(outputs) == len(node.outputs)
    return outputs


def option_text(option: NodeOption) -> str:
    left = ", ".join(short_text(layout) for layout in option.operands)
    right = ", ".join("-" if out is None else short_text(out) for out in option.outputs)
    return f"{left} -> {right}"


def distributed(tensor: torch.Tensor, layout: Layout, mesh: MeshShape) -> Locals:
    """What each rank holds of a tensor: copies, pieces, or random summands."""
    return dict(_distributed(tensor, layout, mesh.sizes))


def _distributed(
    tensor: torch.Tensor, layout: Sequence[Placement], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if not sizes:
        yield (), tensor
        return
    for index, part in enumerate(_parts(tensor, layout[0], sizes[0])):
        for rest, local in _distributed(part, layout[1:], sizes[1:]):
            yield (index, *rest), local


def _parts(tensor: torch.Tensor, placement: Placement, count: int) -> Sequence[torch.Tensor]:
    if isinstance(placement, Shard):
        assert tensor.shape[placement.dim] % count == 0
        return tensor.chunk(count, placement.dim)
    if isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(tensor.numel())
        random = [
            torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor.dtype)
            for _ in range(count - 1)
        ]
        return [*random, tensor - sum(random)]
    return [tensor] * count


def _difference(
    sample: Sample, index: int, whole: Any, layout: Layout | None, parts: Locals, mesh: MeshShape
) -> str | None:
    if not isinstance(whole, torch.Tensor):
        return None if layout is None else "has a layout, and is no tensor"
    assert layout is not None
    wanted = local_shape(whole.shape, layout, mesh)
    for coordinate, part in parts.items():
        if tuple(part.shape) != wanted or part.dtype != whole.dtype:
            return f"rank {coordinate} has {part.dtype} {tuple(part.shape)}, not {wanted}"
    if sample.compared is not None and index not in sample.compared:
        return None

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        if sample.exact or whole.dtype not in _TOLERANCE:
            return torch.equal(a, b)
        # Summands are rounded by their own size: that of the largest element, or of random parts.
        finite = whole[whole.isfinite()].abs()
        largest = max(1.0, finite.max().item() if finite.numel() else 0.0)
        rtol = _TOLERANCE[whole.dtype]
        return torch.allclose(a, b, rtol=rtol, atol=rtol * largest, equal_nan=True)

    for axis in reversed(range(mesh.num_axes)):
        joined: Locals = {}
        for prefix in itertools.product(*(range(size) for size in mesh.sizes[:axis])):
            group = [parts[(*prefix, i)] for i in range(mesh.sizes[axis])]
            placement = layout[axis]
            if isinstance(placement, Shard):
                joined[prefix] = torch.cat(group, placement.dim)
            elif isinstance(placement, Partial):
                joined[prefix] = torch.stack(group).sum(0).to(whole.dtype)
            elif all(same(group[0], other) for other in group[1:]):
                joined[prefix] = group[0]
            else:
                return f"should be the same on all ranks of axis {mesh.names[axis]}, and is not"
        parts = joined
    return None if same(parts[()], whole) else "differs from the global result"
