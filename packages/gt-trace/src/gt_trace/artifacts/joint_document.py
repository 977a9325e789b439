"""A forward and a backward graph as a document, and back, with the joint graph they were cut from.

The two are stored as passes have left them: the cut is torch's, and cannot be made again of a joint
graph alone once passes have run. What each of their inputs and results stands for is stored beside
them, and compared with the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from torch.fx import GraphModule

from gt_trace.artifacts.decoder import Decoder
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.artifacts.encoder import Encoder
from gt_trace.capture.graph_inputs import GraphInput, InputKind
from gt_trace.capture.subclass_layout import PLAIN, TensorLayout
from gt_trace.errors import ArtifactError
from gt_trace.joint.bound_joint import ForwardBackward
from gt_trace.joint.joint_graph import GraphResult, JointGraph, OutputSignature, ResultKind


def _joint_content(encoder: Encoder, parts: ForwardBackward) -> dict[str, Any]:
    """A forward and a backward, and their joint graph, as part of a document of ``encoder``."""
    joint = parts.joint
    return {
        "joint": {
            "graph": encoder.graph(joint.graph_module),
            "inputs": [encoder.graph_input(each) for each in joint.inputs],
            "example_inputs": [encoder.value(each) for each in joint.example_inputs],
            "state": [encoder.state_entry(each) for each in joint.state],
            "state_layouts": [encoder.layout(each) for each in joint.state_layouts],
            "arguments": [encoder.signature(each) for each in joint.arguments],
            "argument_spec": encoder.tree(joint.argument_spec),
            "mode": encoder.mode(joint.mode),
            "results": _results_content(joint.results),
            "outputs": [_output_content(encoder, each) for each in joint.outputs],
            "output_spec": encoder.tree(joint.output_spec),
            "differentiable": sorted(map(list, joint.differentiable)),
            "recast": sorted(joint.recast),
            "gradient_layouts": [
                [kind, name, encoder.layout(layout)]
                for (kind, name), layout in joint.gradient_layouts.items()
            ],
        },
        "forward": {
            "graph": encoder.graph(parts.forward),
            "inputs": [encoder.graph_input(each) for each in parts.forward_inputs],
            "results": _results_content(parts.forward_results),
        },
        "backward": {
            "graph": encoder.graph(parts.backward),
            "inputs": [encoder.graph_input(each) for each in parts.backward_inputs],
            "results": _results_content(parts.backward_results),
        },
    }


def _decoded_joint(decoder: Decoder, content: Any) -> ForwardBackward:
    """The forward and backward that ``_joint_content`` encoded.

    Raises:
        ArtifactError: a graph has other inputs or results than are described.
    """
    joint = _decoded_joint_graph(decoder, content["joint"])
    forward, forward_inputs, forward_results = _decoded_part(decoder, content["forward"])
    backward, backward_inputs, backward_results = _decoded_part(decoder, content["backward"])
    saved = [each.name for each in forward_results if each.kind == "saved"]
    asked = {each.name for each in backward_inputs if each.kind == "saved"}
    if missing := sorted(asked - set(saved)):
        raise ArtifactError(f"the backward reads what the forward does not save: {missing}")
    return ForwardBackward(
        joint=joint,
        forward=forward,
        forward_inputs=forward_inputs,
        forward_results=forward_results,
        backward=backward,
        backward_inputs=backward_inputs,
        backward_results=backward_results,
    )


def _decoded_joint_graph(decoder: Decoder, content: Any) -> JointGraph:
    graph_module, inputs, results = _decoded_part(decoder, content)
    return JointGraph(
        graph_module=graph_module,
        inputs=inputs,
        example_inputs=tuple(map(decoder.value, content["example_inputs"])),
        fake_mode=decoder.fake_mode,
        state=tuple(map(decoder.state_entry, content["state"])),
        state_layouts=tuple(decoder.layout(each) or PLAIN for each in content["state_layouts"]),
        arguments=tuple(map(decoder.signature, content["arguments"])),
        argument_spec=decoder.tree(content["argument_spec"]),
        mode=decoder.mode(content["mode"]),
        results=results,
        outputs=tuple(_decoded_output(decoder, each) for each in content["outputs"]),
        output_spec=decoder.tree(content["output_spec"]),
        differentiable=frozenset(
            (_input_kind(kind), name) for kind, name in content["differentiable"]
        ),
        recast=frozenset(content["recast"]),
        gradient_layouts=_decoded_layouts(decoder, content["gradient_layouts"]),
    )


def _decoded_part(
    decoder: Decoder, content: Any
) -> tuple[GraphModule, tuple[GraphInput, ...], tuple[GraphResult, ...]]:
    graph_module = decoder.graph(content["graph"])
    inputs = tuple(map(decoder.graph_input, content["inputs"]))
    results = tuple(_result(*each) for each in content["results"])
    graph = graph_module.graph
    values: Any = graph.output_node().args[0]
    counts = len(graph.find_nodes(op="placeholder")), len(values)
    if counts != (len(inputs), len(results)):
        raise ArtifactError(
            f"a graph takes and gives {counts[0]} and {counts[1]} values, and {len(inputs)} and "
            f"{len(results)} are described"
        )
    return graph_module, inputs, results


def _results_content(results: Sequence[GraphResult]) -> list[Any]:
    return [list(asdict(each).values()) for each in results]


def _result(kind: Any, name: Any, of: Any, leaf: Any) -> GraphResult:
    if kind not in get_args(ResultKind):
        raise ArtifactError(f"a result of a graph is a {kind!r}")
    return GraphResult(
        kind=kind, name=str(name), of=None if of is None else _input_kind(of), leaf=int(leaf)
    )


def _input_kind(kind: Any) -> InputKind:
    if kind not in get_args(InputKind):
        raise ArtifactError(f"an input of a graph is a {kind!r}")
    found: InputKind = kind
    return found


def _output_content(encoder: Encoder, output: OutputSignature) -> dict[str, Any]:
    return {
        "name": output.name,
        "is_tensor": output.is_tensor,
        "constant": encoder.value(output.constant),
        "repeats": output.repeats,
        "requires_grad": output.requires_grad,
        "layout": encoder.layout(output.layout),
        "gradient_placements": encoder.value(output.gradient_placements),
    }


def _decoded_output(decoder: Decoder, content: Any) -> OutputSignature:
    return OutputSignature(
        name=str(content["name"]),
        is_tensor=bool(content["is_tensor"]),
        constant=decoder.value(content["constant"]),
        repeats=_decoded_repeat(content["repeats"]),
        requires_grad=bool(content["requires_grad"]),
        layout=decoder.layout(content["layout"]),
        gradient_placements=decoder.value(content["gradient_placements"]),
    )


def _decoded_repeat(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise ArtifactError(f"an output repeats {name!r}, which is no name of an output")
    return name


def _decoded_layouts(decoder: Decoder, content: Any) -> dict[tuple[InputKind, str], TensorLayout]:
    return {
        (_input_kind(kind), str(name)): decoder.layout(layout) or PLAIN
        for kind, name, layout in content
    }


JOINT_FORM = DocumentForm(name="joint graph", content=_joint_content, decoded=_decoded_joint)
"""The form of a forward and a backward graph."""
