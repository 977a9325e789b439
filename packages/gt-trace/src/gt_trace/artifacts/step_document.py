"""A captured step as a document, and back."""

from __future__ import annotations

from typing import Any

from gt_trace.artifacts.decoder import Decoder
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.artifacts.encoder import Encoder
from gt_trace.capture.subclass_layout import PLAIN, TensorLayout
from gt_trace.capture.traced_step import TracedStep
from gt_trace.errors import ArtifactError


def step_content(encoder: Encoder, step: TracedStep) -> dict[str, Any]:
    """A step as part of a document of ``encoder``.

    Raises:
        ArtifactError: an optimizer steps inside of it, of which a document has no groups.
    """
    if step.groups:
        raise ArtifactError(
            "an optimizer steps inside of this step, and a stored step has no parameter groups; "
            "step the optimizer outside of the step, or capture at each start"
        )
    return {
        "graph": encoder.graph(step.graph_module),
        "inputs": [encoder.graph_input(each) for each in step.inputs],
        "example_inputs": [encoder.value(each) for each in step.example_inputs],
        "state": [encoder.state_entry(each) for each in step.state],
        "state_layouts": [encoder.layout(each) for each in step.state_layouts],
        "arguments": [encoder.signature(each) for each in step.arguments],
        "argument_spec": encoder.tree(step.argument_spec),
        "output_spec": encoder.tree(step.output_spec),
        "output_layouts": [encoder.layout(each) for each in step.output_layouts],
        "mode": encoder.mode(step.mode),
    }


def decoded_step(decoder: Decoder, content: Any) -> TracedStep:
    """The step that ``step_content`` encoded."""
    return TracedStep(
        graph_module=decoder.graph(content["graph"]),
        inputs=tuple(map(decoder.graph_input, content["inputs"])),
        example_inputs=tuple(map(decoder.value, content["example_inputs"])),
        fake_mode=decoder.fake_mode,
        state=tuple(map(decoder.state_entry, content["state"])),
        state_layouts=tuple(_of_state(decoder.layout(i)) for i in content["state_layouts"]),
        arguments=tuple(map(decoder.signature, content["arguments"])),
        argument_spec=decoder.tree(content["argument_spec"]),
        output_spec=decoder.tree(content["output_spec"]),
        output_layouts=tuple(map(decoder.layout, content["output_layouts"])),
        mode=decoder.mode(content["mode"]),
    )


def _of_state(layout: TensorLayout | None) -> TensorLayout:
    return PLAIN if layout is None else layout


STEP_FORM = DocumentForm(name="training step", content=step_content, decoded=decoded_step)
"""The form of a captured step."""
