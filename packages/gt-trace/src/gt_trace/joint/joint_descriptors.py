"""AOTAutograd's descriptors, read as names of the module's own parameters, buffers and arguments.

A descriptor says which part of which input or output a value of the joint graph is
(torch/_functorch/_aot_autograd/descriptors.py). Some kinds stand for what a capture here refuses:
inputs that share memory, effect tokens, functionalized random state. They are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from gt_trace._torch_joint_internals import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from gt_trace.capture.flat_inputs import FlatInputs
from gt_trace.capture.graph_inputs import GraphInput
from gt_trace.capture.subclass_layout import TensorLayout
from gt_trace.errors import CaptureError
from gt_trace.joint.joint_graph import GraphResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedInput:
    """One placeholder: a plain tensor, or something of a subclass that is no tensor."""

    node: Node
    meaning: GraphInput | None
    """The input that a plain tensor stands for; None for other parts, as a DTensor's mesh."""

    constant: Any = None
    """The part that is no tensor, where ``meaning`` is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedResult:
    """One value that the joint graph returns."""

    value: Node | None
    """The node that computes it; None for a gradient that nothing computes."""

    meaning: GraphResult | None
    """The result that a plain tensor stands for; None for a part that is no tensor."""

    position: int
    """Its place among everything that the graph returned."""


def state_names(flat: FlatInputs) -> list[str]:
    """Names under which an exported module must register the state, one for each tensor."""
    return [f"state_{index}" for index in range(len(flat.slots))]


class InputNames:
    """Finds the parameter, buffer or argument that a descriptor means."""

    def __init__(self, flat: FlatInputs) -> None:
        self._state = {
            name: (slot.entry, layout)
            for name, slot, layout in zip(
                state_names(flat), flat.slots, flat.state_layouts, strict=True
            )
        }
        self._arguments = [argument for argument in flat.arguments if argument.layout is not None]

    def find(self, descriptor: object) -> tuple[GraphInput, TensorLayout] | None:
        """The input as a whole, and its layout; None for descriptors of something else."""
        if isinstance(descriptor, ParamAOTInput | BufferAOTInput):
            entry, layout = self._state[descriptor.target]
            meaning = GraphInput(kind=entry.kind, name=entry.name, aliases=entry.names[1:])
            return meaning, layout
        if isinstance(descriptor, PlainAOTInput):
            argument = self._arguments[descriptor.idx]
            assert argument.layout is not None
            return GraphInput(kind="argument", name=argument.name), argument.layout
        return None

    def explain(self, descriptor: Any) -> str:
        """Why a descriptor of something else is refused."""
        meaning = "nothing that is known" if descriptor is None else str(descriptor.expr())
        for name, (entry, _) in self._state.items():
            meaning = meaning.replace(repr(name), repr(entry.name))
        for index, argument in enumerate(self._arguments):
            meaning = meaning.replace(f"args[{index}]", argument.name)
        return (
            f"it needs {meaning} ({type(descriptor).__name__}): inputs or outputs that share "
            "memory, effects with an order of their own, and in-place updates that require a "
            "gradient are not supported; return and pass copies, or use trace_step"
        )


def described_inputs(
    graph_module: GraphModule, names: InputNames, output_names: Sequence[str]
) -> list[DescribedInput]:
    """What each placeholder stands for.

    Raises:
        CaptureError: a placeholder is nothing that a call could provide; all are listed.
    """
    found: list[DescribedInput] = []
    problems: list[str] = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        descriptor, attributes = _peel(node.meta.get("desc"), SubclassGetAttrAOTInput)
        if isinstance(descriptor, TangentAOTInput) and isinstance(
            descriptor.output, PlainAOTOutput
        ):
            meaning = GraphInput(kind="tangent", name=output_names[descriptor.output.idx])
            found.append(DescribedInput(node=node, meaning=meaning))
            continue
        known = names.find(descriptor)
        if known is None:
            problems.append(names.explain(node.meta.get("desc")))
            continue
        whole, layout = known
        leaf, constant = _part(layout, attributes)
        if leaf is None:
            found.append(DescribedInput(node=node, meaning=None, constant=constant))
            continue
        meaning = GraphInput(kind=whole.kind, name=whole.name, aliases=whole.aliases, leaf=leaf)
        found.append(DescribedInput(node=node, meaning=meaning))
    if problems:
        raise CaptureError("the joint graph cannot be used:\n  " + "\n  ".join(problems))
    return found


def described_results(
    graph_module: GraphModule,
    names: InputNames,
    output_names: Sequence[str],
) -> list[DescribedResult]:
    """What each returned value stands for; see ``described_inputs``.

    Raises:
        CaptureError: a value is nothing that a caller could use; all are listed.
    """
    output = graph_module.graph.output_node()
    found: list[DescribedResult] = []
    problems: list[str] = []
    values = output.args[0]
    assert isinstance(values, list | tuple)
    for position, (value, descriptor) in enumerate(zip(values, output.meta["desc"], strict=True)):
        if descriptor is None:  # in the place of a gradient that nobody asked for
            continue
        assert value is None or isinstance(value, Node)
        whole, attributes = _peel(descriptor, SubclassGetAttrAOTOutput)
        if isinstance(whole, PlainAOTOutput):
            meaning = GraphResult(kind="output", name=output_names[whole.idx])
            found.append(DescribedResult(value=value, meaning=meaning, position=position))
            continue
        known = None
        if isinstance(whole, InputMutationAOTOutput):
            known = names.find(whole.mutated_input)
        elif isinstance(whole, GradAOTOutput):
            known = names.find(whole.grad_of)
        if known is None:
            problems.append(names.explain(descriptor))
            continue
        of, layout = known
        leaf = _part(layout, attributes)[0] if attributes else 0
        found.append(
            DescribedResult(
                value=value,
                position=position,
                meaning=None
                if leaf is None
                else GraphResult(
                    kind="gradient" if isinstance(whole, GradAOTOutput) else "mutation",
                    name=of.name,
                    of=of.kind,
                    leaf=leaf,
                ),
            )
        )
    if problems:
        raise CaptureError("the joint graph cannot be used:\n  " + "\n  ".join(problems))
    return found


def _peel(descriptor: Any, wrapper: type[Any]) -> tuple[Any, tuple[str, ...]]:
    """The tensor that is meant, and the path of attributes to its part."""
    attributes: list[str] = []
    while isinstance(descriptor, wrapper):
        attributes.append(descriptor.attr)
        descriptor = descriptor.base
    return descriptor, tuple(reversed(attributes))


def _part(layout: TensorLayout, attributes: Sequence[str]) -> tuple[int | None, Any]:
    """The leaf at the end of that path; or None, and what else is there."""
    leaf = 0
    for attribute in attributes:
        constants = dict(layout.constants)
        if attribute in constants:
            return None, constants[attribute]
        for name, inner in layout.attributes:
            if name == attribute:
                layout = inner
                break
            leaf += inner.num_leaves
    return leaf, None
