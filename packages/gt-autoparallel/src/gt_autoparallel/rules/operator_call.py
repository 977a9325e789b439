"""One call of an operator as its rule sees it: arguments by name, tensors as global specs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import (
    HigherOrderOperator,
    OpOverload,
    argument_defaults,
)
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec, Value


@dataclass(frozen=True, slots=True)
class CallOperand:
    """Stands in the arguments for the ``index``-th operand (see ``PlacementNode.operands``)."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """The target of a node with its arguments bound to the names of the operator's schema."""

    target: OpOverload | HigherOrderOperator
    args: tuple[Any, ...]
    """Positional arguments as the node has them, with ``CallOperand`` where it takes tensors."""

    kwargs: Mapping[str, Any]
    """The others that the node gives."""

    arguments: Mapping[str, Any]
    """Every argument of the schema by name, in order, defaults included."""

    operands: tuple[TensorSpec, ...]
    """Global tensors; an operand that is given twice stands here twice."""

    outputs: tuple[TensorSpec | None, ...]

    def index(self, name: str) -> int | None:
        """Position among ``operands`` of the tensor argument ``name``; None where it is None."""
        value = self.arguments.get(name)
        return value.index if isinstance(value, CallOperand) else None

    def spec(self, name: str) -> TensorSpec:
        """The tensor argument ``name``."""
        index = self.index(name)
        assert index is not None, f"{self.target} has no tensor {name!r}"
        return self.operands[index]

    def indices(self, name: str) -> tuple[int, ...]:
        """Positions among ``operands`` of the tensors in the list argument ``name``."""
        leaves = pytree.tree_leaves(self.arguments[name])
        return tuple(leaf.index for leaf in leaves if isinstance(leaf, CallOperand))

    def output(self, index: int = 0) -> TensorSpec:
        """The ``index``-th output, which must be a tensor."""
        spec = self.outputs[index]
        assert spec is not None, f"output {index} of {self.target} is no tensor"
        return spec

    def dim(self, name: str = "dim", *, num_dims: int | None = None) -> int:
        """The argument ``name`` as a dim that is not negative.

        Args:
            name: of an argument that holds one dim.
            num_dims: dims of the tensor that it speaks of; None: of the first operand.
        """
        size = len(self.operands[0].shape) if num_dims is None else num_dims
        dim: int = self.arguments[name]
        return dim % size if size else 0


def operator_call(node: PlacementNode, operands: tuple[TensorSpec, ...]) -> OperatorCall:
    """Bind the arguments of an operator node to the names of its schema."""
    target: OpOverload | HigherOrderOperator = node.target
    count = 0

    def numbered(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, Value):
            return leaf
        count += 1
        return CallOperand(count - 1)

    args, kwargs = pytree.tree_map(numbered, (node.args, node.kwargs))
    arguments = argument_defaults(target)
    arguments.update(zip(arguments, args, strict=False))
    arguments.update(kwargs)
    return OperatorCall(
        target=target,
        args=args,
        kwargs=kwargs,
        arguments=arguments,
        operands=operands,
        outputs=node.outputs,
    )
