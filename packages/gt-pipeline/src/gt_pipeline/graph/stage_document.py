"""A stage's graphs as a document, and back: what one process captured, another can run.

Stored are the joint graph, after passes that need forward and backward together, and those graphs
of actions that passes have changed since the cut. The cut itself is not: it follows from the joint
graph, and to make it again takes no longer than to read it and nothing that a file could claim of
it (docs/decisions/0042-stages-as-artifacts.md). So everything is verified that a document says:
the joint graph before it is cut, and a changed graph with what its cut takes and gives.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection
from functools import partial
from typing import Any, Unpack, get_args

from gt_passes import Verifier
from gt_passes.verifier.verifier import GraphInterface
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph.activations import ActivationPlacement
from gt_pipeline.graph.changed_graphs import is_unchanged, refuse_problems
from gt_pipeline.graph.rewrite_stage import RewrittenStage
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_pipeline.graph.stage_capture import StageCapture, input_slot
from gt_pipeline.graph.stage_cut import cut_stage
from gt_pipeline.runner.stage_protocol import ActivationSignature
from gt_trace import TensorLayout
from gt_trace.artifacts.decoder import Decoder
from gt_trace.artifacts.encoded_document import (
    DecodingOptions,
    EncodedDocument,
    decode_document,
    encode_document,
)
from gt_trace.artifacts.encoder import Encoder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.operators import NAMESPACES
from gt_trace.artifacts.step_document import decoded_step, step_content
from gt_trace.errors import ArtifactError


def encode_stage(
    stage: RewrittenStage, axes: MeshAxes, *, namespaces: Collection[str] = NAMESPACES
) -> EncodedDocument:
    """A stage's graphs as a document that is the same on all ranks that are alike.

    Args:
        stage: ``GraphPipelineStage.rewritten``.
        axes: names of this rank's process groups.
        namespaces: of operators that graphs may call.

    Raises:
        ArtifactError: it holds something that no document can hold; it is named.
    """
    return encode_document(stage, axes, stage_content, namespaces=namespaces)


def decode_stage(
    document: Any, axes: MeshAxes, *, verify: bool = True, **options: Unpack[DecodingOptions]
) -> RewrittenStage:
    """The stage of a document, as this rank would have captured it.

    Args:
        document: as ``encode_stage`` made it, through JSON.
        axes: names of this rank's process groups, and where it stands.
        verify: whether to verify every stored graph.
        **options: ``DecodingOptions``; the graphs of stages that overlap need one ``fake_mode``.

    Raises:
        ArtifactError: the document is damaged, names what there is not here, or describes graphs
            that are broken or cannot be cut; every problem of a graph is listed.
    """
    decoded = partial(decoded_stage, verify=verify)
    return decode_document(document, axes, decoded, **options)


def stage_content(encoder: Encoder, stage: RewrittenStage) -> dict[str, Any]:
    """A stage as part of a document of ``encoder``."""
    capture = stage.graphs.capture
    required, defaults = [], []
    for name, default in capture.left_out.items():
        if default is inspect.Parameter.empty:
            required.append(name)
        else:
            defaults.append([name, encoder.value(default)])
    return {
        "joint": step_content(encoder, capture.traced),
        "stage_index": capture.stage_index,
        "num_stages": capture.num_stages,
        "input_signature": [_signature_content(encoder, s) for s in capture.input_signature],
        "output_signature": [_signature_content(encoder, s) for s in capture.output_signature],
        "output_placements": [
            None if each is None else encoder.value((each.mesh_axes, each.placements, each.shape))
            for each in capture.output_placements
        ],
        "results": [
            None if slot is None else [slot.kind, slot.name, slot.leaf] for slot in capture.results
        ],
        "kwarg_names": list(capture.kwarg_names),
        "left_out": {"required": required, "defaults": defaults},
        "takes_any_kwargs": capture.takes_any_kwargs,
        "has_target": capture.has_target,
        "differentiates": capture.differentiates,
        "gradient_layouts": [
            [name, encoder.layout(layout)] for name, layout in capture.gradient_layouts.items()
        ],
        "changed_actions": {
            cut.kind: encoder.graph(stage.actions[cut.kind].graph_module)
            for cut in stage.graphs
            if not is_unchanged(cut.graph_module, stage.actions[cut.kind].graph_module)
        },
    }


def decoded_stage(decoder: Decoder, content: Any, *, verify: bool = True) -> RewrittenStage:
    """The stage that ``stage_content`` encoded, verified and cut.

    Raises:
        ArtifactError: as for ``decode_stage``.
    """
    capture = _decoded_capture(decoder, content)
    subject = f"stage {capture.stage_index}"
    verifier = Verifier()
    if verify:
        joint = verifier.verify(capture.traced.graph_module)
        refuse_problems(f"the joint graph of {subject}", joint.problems)
    try:
        graphs = cut_stage(capture, verify=False)
    except StageCutError as error:
        raise ArtifactError(f"the document describes a stage that cannot be: {error}") from error
    changed = content["changed_actions"]
    actions = {cut.kind: cut for cut in graphs}
    if unknown := changed.keys() - actions.keys():
        raise ArtifactError(f"the stage has no graphs of {', '.join(sorted(unknown))}")
    for cut in graphs:
        if cut.kind not in changed:
            continue
        graph_module = decoder.graph(changed[cut.kind])
        if verify:
            report = verifier.verify(graph_module, interface=GraphInterface.of(cut.graph_module))
            refuse_problems(f"{cut.kind} of {subject}", report.problems)
        actions[cut.kind] = dataclasses.replace(cut, graph_module=graph_module)
    return RewrittenStage(graphs=graphs, actions=actions)


def _decoded_capture(decoder: Decoder, content: Any) -> StageCapture:
    traced = decoded_step(decoder, content["joint"])
    left_out = dict.fromkeys(content["left_out"]["required"], inspect.Parameter.empty)
    defaults = {name: decoder.value(each) for name, each in content["left_out"]["defaults"]}
    layouts = {name: decoder.layout(each) for name, each in content["gradient_layouts"]}
    capture = StageCapture(
        traced=traced,
        stage_index=int(content["stage_index"]),
        num_stages=int(content["num_stages"]),
        input_signature=_decoded_signatures(decoder, content["input_signature"]),
        output_signature=_decoded_signatures(decoder, content["output_signature"]),
        output_placements=tuple(
            None if each is None else _decoded_placement(decoder.value(each))
            for each in content["output_placements"]
        ),
        inputs=tuple(map(input_slot, traced.inputs)),
        results=tuple(None if each is None else _slot(*each) for each in content["results"]),
        kwarg_names=tuple(content["kwarg_names"]),
        left_out={**left_out, **defaults},
        takes_any_kwargs=bool(content["takes_any_kwargs"]),
        has_target=bool(content["has_target"]),
        differentiates=bool(content["differentiates"]),
        gradient_layouts={name: each for name, each in layouts.items() if each is not None},
    )
    refuse_problems(f"stage {capture.stage_index}", _misfits(capture))
    return capture


def _misfits(capture: StageCapture) -> list[str]:
    """What a document says of a joint graph that the graph does not have."""
    graph = capture.traced.graph_module.graph
    results: Any = graph.output_node().args[0]
    slots = capture.results
    num_placeholders = len(graph.find_nodes(op="placeholder"))
    problems = []
    if num_placeholders != len(capture.inputs):
        problems.append(f"{len(capture.inputs)} inputs are described, and {num_placeholders} taken")
    if [each is None for each in results] != [slot is None for slot in slots]:
        problems.append(f"{len(slots)} results are described, and {len(results)} given, or others")
    num_outputs = sum(slot is not None and slot.kind == "output" for slot in slots)
    if not num_outputs == len(capture.output_signature) == len(capture.output_placements):
        problems.append(f"{num_outputs} outputs have {len(capture.output_signature)} signatures")
    layouts: dict[str, TensorLayout] = dict(capture.gradient_layouts)
    leaves: dict[str, int] = {}
    for slot in slots:
        if slot is not None and slot.kind == "gradient":
            leaves[slot.name] = leaves.get(slot.name, 0) + 1
    if leaves != {name: layout.num_leaves for name, layout in layouts.items()}:
        problems.append("gradients are described that are not among the results")
    return problems


def _signature_content(encoder: Encoder, signature: ActivationSignature) -> Any:
    return encoder.value(
        (signature.shape, signature.dtype, signature.requires_grad, signature.repeats)
    )


def _decoded_signatures(decoder: Decoder, content: Any) -> tuple[ActivationSignature, ...]:
    facts = map(decoder.value, content)
    return tuple(
        ActivationSignature(shape=shape, dtype=dtype, requires_grad=requires_grad, repeats=repeats)
        for shape, dtype, requires_grad, repeats in facts
    )


def _decoded_placement(facts: Any) -> ActivationPlacement:
    mesh_axes, placements, shape = facts
    return ActivationPlacement(mesh_axes=mesh_axes, placements=placements, shape=shape)


def _slot(kind: Any, name: Any, leaf: Any) -> Slot:
    if kind not in get_args(SlotKind):
        raise ArtifactError(f"a result of a stage is a {kind!r}")
    return Slot(kind=kind, name=str(name), leaf=int(leaf))
