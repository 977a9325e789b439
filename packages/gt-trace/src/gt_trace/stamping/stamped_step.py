"""The captured step of the whole model, rebuilt around its stamped graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gt_trace._torch_internals import lazy_graph_module
from gt_trace.capture.captured_mode import CapturedMode
from gt_trace.capture.fake_tensors import fake_over
from gt_trace.capture.flat_inputs import FlatInputs, fake_like
from gt_trace.capture.graph_inputs import GraphInput, name_placeholders, with_uses
from gt_trace.capture.subclass_layout import TensorLayout, flatten_tensor
from gt_trace.capture.traced_step import TracedStep
from gt_trace.stamping.layer_plan import PlannedLayers
from gt_trace.stamping.recordings import ReturnedLeaf, StreamRecording
from gt_trace.stamping.report import NotStampable
from gt_trace.stamping.short_graph import TraceMarks, cut_graph
from gt_trace.stamping.stamped_graph import StampedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """What is known of the step of the whole model without a trace."""

    flat: FlatInputs
    recording: StreamRecording
    mode: CapturedMode
    meta_device: torch.device
    """What tensors on meta stand for."""


def stamped_step(
    short: TracedStep,
    short_recording: StreamRecording,
    marks: TraceMarks,
    planned: PlannedLayers,
    whole: WholeStep,
) -> TracedStep:
    """Make the step of the whole model.

    Raises:
        NotStampable: something is ambiguous.
    """
    if len(short_recording.outputs) != len(short.output_layouts):
        raise NotStampable("the step returned other outputs when it was traced")
    inputs = whole.flat.graph_inputs()
    examples = _examples(short, inputs, planned, whole)
    placeholder_values = [fake_over(each, _view_of(each)) for each in examples]
    builder = StampedGraph(
        cut_graph(short, planned, marks),
        inputs=list(zip(inputs, placeholder_values, strict=True)),
        shape_env=short.fake_mode.shape_env,
        num_unused=_num_unused(short, short_recording, planned),
    )
    outputs = _Outputs(builder, planned, short, short_recording)
    leaves = [
        made
        for index, leaf in enumerate(whole.recording.outputs)
        for made in outputs.plain(index, leaf)
    ]
    graph = builder.build(leaves)
    reads = {f"{each.kind} {each.name}": each.uses for each in short.inputs}
    inputs = with_uses(inputs, graph, reads)
    name_placeholders(graph, inputs)
    return replace(
        short,
        # Whoever runs passes changes the graph, and code for it as it is would be made in vain.
        graph_module=lazy_graph_module(
            builder.attributes, graph, type(short.graph_module).__name__
        ),
        inputs=inputs,
        example_inputs=tuple(examples),
        state=tuple(slot.entry for slot in whole.flat.slots),
        state_layouts=whole.flat.state_layouts,
        output_spec=whole.recording.output_spec,
        output_layouts=tuple(outputs.layouts),
        mode=replace(whole.mode, autograd=short.mode.autograd),
    )


def _num_unused(short: TracedStep, recording: StreamRecording, planned: PlannedLayers) -> int:
    """How many gradients of the first interior unit came out as None."""
    returned = zip(recording.outputs, short.output_layouts, strict=True)
    owners = [
        planned.layers.index_of(leaf.gradient_of)
        for leaf, layout in returned
        if layout is None and leaf.gradient_of is not None
    ]
    plan = planned.plan
    return sum(each is not None and plan.unit_of(each) == plan.first for each in owners)


def _examples(
    short: TracedStep, inputs: Sequence[GraphInput], planned: PlannedLayers, whole: WholeStep
) -> list[torch.Tensor]:
    """A fake tensor for each input; those of the traced layers are the traced ones."""
    traced = {
        (given.name, given.leaf): example
        for given, example in zip(short.inputs, short.example_inputs, strict=True)
    }
    real = {
        (slot.entry.name, index): leaf
        for slot in whole.flat.slots
        for index, leaf in enumerate(flatten_tensor(slot.tensor)[0])
    }
    examples: list[torch.Tensor] = []
    for given in inputs:
        key = (given.name, given.leaf)
        if key in traced:
            examples.append(traced[key])
            continue
        same = (planned.counterpart_name(given.name), given.leaf)
        if same not in traced:
            raise NotStampable(f"{given.name} has no counterpart {same[0]} in the traced layers")
        made = fake_like(real[key], short.fake_mode, meta_device=whole.meta_device)
        examples.append(made.requires_grad_(traced[same].requires_grad))
    return examples


def _view_of(fake: torch.Tensor) -> torch.Tensor:
    """A tensor on meta in the storage of a fake one."""
    element = torch.empty((0,), dtype=fake.dtype, device="meta")
    return element.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())


Made = Callable[[StampedGraph], Any]


class _Outputs:
    """Finds what the whole model returns among what the shortened one does."""

    def __init__(
        self,
        builder: StampedGraph,
        planned: PlannedLayers,
        short: TracedStep,
        recording: StreamRecording,
    ) -> None:
        self._builder = builder
        self._planned = planned
        self.layouts: list[TensorLayout | None] = []
        self._next_other = 0
        returned: Any = short.graph_module.graph.output_node().args[0]
        values = list(returned)
        self._by_gradient: dict[str, tuple[TensorLayout | None, list[Any]]] = {}
        self._others: list[tuple[ReturnedLeaf, TensorLayout | None, list[Any]]] = []
        begin = 0
        for leaf, layout in zip(recording.outputs, short.output_layouts, strict=True):
            num = 1 if layout is None else layout.num_leaves
            plain = values[begin : begin + num]
            begin += num
            if leaf.gradient_of is not None and leaf.gradient_of not in self._by_gradient:
                self._by_gradient[leaf.gradient_of] = (layout, plain)
            else:
                self._others.append((leaf, layout, plain))

    def plain(self, index: int, leaf: ReturnedLeaf) -> list[Made]:
        """The plain outputs of one leaf of the whole model, and its layout into ``layouts``."""
        if leaf.gradient_of is None:
            return self._other(index, leaf)
        planned, plan = self._planned, self._planned.plan
        layer, own = planned.layers.split(leaf.gradient_of)
        if layer is None or not plan.is_interior(layer):
            return self._kept(leaf.gradient_of, layer)
        names = [
            planned.counterpart_name(leaf.gradient_of, unit) for unit in (plan.first, plan.last)
        ]
        if any(name not in self._by_gradient for name in names):
            raise NotStampable(f"output {index} has no counterpart in the traced layers")
        (layout, ours), (other_layout, theirs) = (self._by_gradient[name] for name in names)
        if layout != other_layout:
            raise NotStampable(f"the gradients of {names[0]} and {names[1]} are laid out otherwise")
        self.layouts.append(layout)
        return [
            self._builder.layer_output(one, other, plan.unit_of(layer), f"gradient of {own}")
            for one, other in zip(ours, theirs, strict=True)
        ]

    def _kept(self, name: str, layer: int | None) -> list[Made]:
        if name not in self._by_gradient:
            raise NotStampable(f"the gradient of {name} is not returned by the traced layers")
        layout, plain = self._by_gradient[name]
        self.layouts.append(layout)
        return [self._builder.kept_output(value, layer) for value in plain]

    def _other(self, index: int, leaf: ReturnedLeaf) -> list[Made]:
        if self._next_other >= len(self._others):
            raise NotStampable(f"output {index} is not among those of the shortened model")
        found, layout, plain = self._others[self._next_other]
        self._next_other += 1
        if found.gradient_of is not None or found != leaf:
            raise NotStampable(f"output {index} depends on the number of layers")
        self.layouts.append(layout)
        return [self._builder.kept_output(value, None) for value in plain]
