"""A captured step as a document, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gt_trace._torch_internals import FakeTensorMode
from gt_trace.artifacts.decoder import Decoder
from gt_trace.artifacts.encoder import Encoder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.operators import NAMESPACES
from gt_trace.capture.subclass_layout import PLAIN, TensorLayout
from gt_trace.capture.traced_step import TracedStep
from gt_trace.errors import ArtifactError
from gt_trace.garbage_collection import held_garbage_collection


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedStep:
    """A step as JSON, and the bytes of the constant tensors that it names."""

    document: Mapping[str, Any]
    blobs: Mapping[str, bytes]


def encode_step(
    step: TracedStep, axes: MeshAxes, *, namespaces: Collection[str] = NAMESPACES
) -> EncodedStep:
    """A captured step as a document that is the same on all ranks that are alike.

    Args:
        step: as captured, or after passes that generate no code.
        axes: names of this rank's process groups.
        namespaces: of operators that the graph may call.

    Raises:
        ArtifactError: the step holds something that no document can hold; it is named.
    """
    encoder = Encoder(axes, namespaces=namespaces)
    document = encoder.document(step_content(encoder, step))
    return EncodedStep(document=document, blobs=encoder.blobs)


def decode_step(
    document: Any,
    axes: MeshAxes,
    *,
    blob: Callable[[str], bytes],
    fake_mode: FakeTensorMode | None = None,
    namespaces: Collection[str] = NAMESPACES,
) -> TracedStep:
    """The step of a document, as this rank would have captured it.

    Args:
        document: as ``encode_step`` made it, through JSON.
        axes: names of this rank's process groups, and where it stands.
        blob: gives the bytes of a constant tensor by its name.
        fake_mode: as for ``trace_step``.
        namespaces: of operators that the graph may call.

    Raises:
        ArtifactError: the document is damaged, or names what there is not here.
    """
    with readable(), held_garbage_collection():
        decoder = Decoder(document, axes, blob=blob, fake_mode=fake_mode, namespaces=namespaces)
        return decoded_step(decoder, decoder.content)


def step_content(encoder: Encoder, step: TracedStep) -> dict[str, Any]:
    """A step as part of a document of ``encoder``."""
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


@contextmanager
def readable() -> Iterator[None]:
    """Inside, a document is decoded: whatever is not as it should be is damage.

    Raises:
        ArtifactError: something was not.
    """
    try:
        yield
    except ArtifactError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ArtifactError(f"the document is not one that was written here ({what})") from error
    except (RuntimeError, RecursionError) as error:
        first_line = str(error).partition("\n")[0]
        raise ArtifactError(
            f"the document describes what there cannot be ({first_line})"
        ) from error


def _of_state(layout: TensorLayout | None) -> TensorLayout:
    return PLAIN if layout is None else layout
