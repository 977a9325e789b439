"""An operator on one rank's shards: what is known of it (``ShardedCall``), and what runs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import Shard

from gt_autoparallel.graph.layouts import MeshShape, local_shape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.rules.operator_call import OperatorCall


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """A function and its arguments. It can be traced, and its shapes are those of every rank."""

    function: Callable[..., Any]
    """An ``OpOverload``, or a function of a few of them; constants in it may depend on the rank."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCall:
    """A call with the option that was chosen for it, on one rank."""

    call: OperatorCall
    option: NodeOption
    mesh: MeshShape
    coordinate: tuple[int, ...]
    """Place of the rank in the mesh, one number for each axis."""

    def operand_shape(self, index: int) -> tuple[int, ...]:
        """Shape of this rank's shard of an operand."""
        shape = self.call.operands[index].shape
        return local_shape(shape, self.option.operands[index], self.mesh)

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of this rank's shard of an output."""
        return local_shape(self.call.output(index).shape, self.option.output(index), self.mesh)

    def operand_shard(self, index: int, dim: int) -> tuple[int, int]:
        """Which piece of ``dim`` of an operand this rank has, and how many pieces there are."""
        return self._shard(self.option.operands[index], dim)

    def output_shard(self, index: int, dim: int) -> tuple[int, int]:
        """Which piece of ``dim`` of an output this rank has, and how many pieces there are."""
        return self._shard(self.option.output(index), dim)

    def with_arguments(
        self, function: Callable[..., Any] | None = None, **changed: Any
    ) -> LocalCall:
        """The call with some arguments changed, by name, and perhaps of another function.

        What is positional stays so, since passes over the traced graph expect the usual form.
        """
        names = tuple(self.call.arguments)
        args = tuple(
            changed.pop(name, value) for name, value in zip(names, self.call.args, strict=False)
        )
        kwargs = {**self.call.kwargs, **changed}
        return LocalCall(function=function or self.call.target, args=args, kwargs=kwargs)

    def _shard(self, layout: tuple[Any, ...], dim: int) -> tuple[int, int]:
        position, count = 0, 1
        for placement, size, index in zip(layout, self.mesh.sizes, self.coordinate, strict=True):
            if isinstance(placement, Shard) and placement.dim == dim:
                position, count = position * size + index, count * size
        return position, count


Localize = Callable[[ShardedCall], LocalCall]
