"""A joint graph: forward and backward of a module as one graph, with the loss left outside.

Where ``trace_step`` captures a whole step, here the gradient *arrives* from outside, one tangent
for each differentiable output, so that an ordinary autograd loop (``loss.backward()``) runs around
the graph. What each placeholder and each result stands for is read from AOTAutograd's descriptors
(torch/_functorch/_aot_autograd/descriptors.py); nothing depends on the order of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch.distributed.tensor.placement_types import Placement
from torch.fx import GraphModule

from gt_trace._torch_internals import pytree
from gt_trace.capture.bound_inputs import CapturedInputs
from gt_trace.capture.graph_inputs import InputKind
from gt_trace.capture.subclass_layout import TensorLayout

ResultKind = Literal["mutation", "output", "gradient", "saved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphResult:
    """What one value that a graph returns stands for."""

    kind: ResultKind
    """mutation: the new content of a buffer or argument that the module updated in place.
    output: what the module returned. gradient: that of a parameter, buffer or argument.
    saved: what a forward graph keeps for the backward one."""

    name: str
    """Name of the output (as ``output['logits']``), of the input that was updated or gets the
    gradient, or of the node that is saved."""

    of: InputKind | None = None
    """Kind of the input that was updated or gets the gradient; None for others."""

    leaf: int = 0
    """Position among the plain tensors of which a tensor subclass is made; 0 for a plain tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSignature:
    """One leaf of the tree that the module returns."""

    name: str
    is_tensor: bool
    constant: Any = None
    """The value of a leaf that is no tensor."""

    repeats: str | None = None
    """Name of the output that is the same tensor, returned before; ``is_tensor`` is then False."""

    requires_grad: bool = False
    layout: TensorLayout | None = None
    """How a tensor is made of plain ones; None for a leaf that is no tensor."""

    gradient_placements: tuple[Placement, ...] | None = None
    """How the backward expects the gradient of a DTensor to be placed; one that arrives otherwise
    is redistributed. None for a plain tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph(CapturedInputs):
    """Forward and backward of one module in one graph.

    ``graph_module`` is a function of plain tensors: parameters and buffers, arguments, tangents. It
    returns mutated inputs, outputs and gradients, and has no side effect. ``partition``
    cuts it in a forward and a backward graph, which can be run.
    """

    is_differentiable: ClassVar[bool] = True

    graph_module: GraphModule
    results: tuple[GraphResult, ...]
    """What each value that the graph returns stands for, in order."""

    outputs: tuple[OutputSignature, ...]
    output_spec: pytree.TreeSpec
    differentiable: frozenset[tuple[InputKind, str]]
    """Every parameter, buffer and argument that required a gradient, reached by one or not."""

    recast: frozenset[str]
    """Names of the arguments that autocast cast several times, as it does with no leaf."""

    gradient_layouts: Mapping[tuple[InputKind, str], TensorLayout]
    """How the gradients are made of plain tensors, by the inputs that get one."""

    @property
    def num_forward_results(self) -> int:
        """Leading results that the forward computes: mutations and outputs."""
        return sum(result.kind in ("mutation", "output") for result in self.results)
