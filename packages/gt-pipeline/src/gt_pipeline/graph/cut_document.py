"""Programs that were cut from one graph as documents, and back: stages, and microbatches.

Stored are the whole graph, after passes that need forward and backward together, and the graphs
that passes have changed since the cut. The cut itself follows from the whole graph, and is
recomputed when the document is read (docs/decisions/0042-stages-as-artifacts.md). Everything that
a document says is verified: the whole graph before it is cut, and a changed graph with what
its cut takes and gives.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, get_args

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gt_passes import Verifier
from gt_passes.verifier.verifier import GraphInterface
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph.accumulation_cut import AccumulationGraphs, MicrobatchGraph, cut_tidied
from gt_pipeline.graph.activations import ActivationPlacement
from gt_pipeline.graph.rewrite_stage import RewrittenStage
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_pipeline.graph.stage_capture import StageCapture, input_slot
from gt_pipeline.graph.stage_cut import cut_stage
from gt_pipeline.runner.stage_protocol import ActivationSignature
from gt_trace import TensorLayout, TracedStep
from gt_trace.artifacts.decoder import Decoder
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.artifacts.encoder import Encoder
from gt_trace.artifacts.step_document import decoded_step, step_content
from gt_trace.errors import ArtifactError


def _content(
    encoder: Encoder,
    whole: TracedStep,
    facts: Mapping[str, Any],
    graphs: Mapping[str, GraphModule | None],
) -> dict[str, Any]:
    """Describe a program; a graph is None where it is as it was cut."""
    return {
        "whole": step_content(encoder, whole),
        "facts": facts,
        "graphs": {
            name: None if graph is None else encoder.graph(graph) for name, graph in graphs.items()
        },
    }


def _decoded_whole(decoder: Decoder, content: Any, subject: str) -> TracedStep:
    traced = decoded_step(decoder, content["whole"])
    problems = Verifier().verify(traced.graph_module).problems
    _refuse_problems(f"the whole graph of {subject}", problems)
    return traced


@contextmanager
def _cutting(subject: str) -> Iterator[None]:
    try:
        yield
    except StageCutError as error:
        raise ArtifactError(f"the document describes {subject} that cannot be: {error}") from error


def _changed_graphs(
    decoder: Decoder, content: Any, cut: Mapping[str, GraphModule], subject: str
) -> dict[str, GraphModule]:
    """Return the graphs of a document that differ from those that were cut, verified."""
    stored = content["graphs"]
    if stored.keys() != cut.keys():
        raise ArtifactError(f"graphs of {', '.join(stored)} are stored, and not of {[*cut]}")
    changed = {name: decoder.graph(each) for name, each in stored.items() if each is not None}
    for name, graph_module in changed.items():
        report = Verifier().verify(graph_module, interface=GraphInterface.of(cut[name]))
        _refuse_problems(f"the {name} graph of {subject}", report.problems)
    return changed


def _refuse_problems(what: str, problems: Iterable[object]) -> None:
    """Raise ArtifactError that lists all problems of what a document describes, if any."""
    if found := list(problems):
        lines = "\n  - ".join(map(str, found))
        raise ArtifactError(f"the document describes {what} wrongly:\n  - {lines}")


# ---- pipeline stages ----------------------------------------------------------------------------


def _stage_content(encoder: Encoder, stage: RewrittenStage) -> dict[str, Any]:
    capture = stage.graphs.capture
    required, defaults = [], []
    for name, default in capture.left_out.items():
        if default is inspect.Parameter.empty:
            required.append(name)
        else:
            defaults.append([name, encoder.value(default)])
    facts = {
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
    }
    graphs = {
        cut.kind: (cut.graph_module, stage.actions[cut.kind].graph_module) for cut in stage.graphs
    }
    return _content(
        encoder,
        capture.traced,
        facts,
        {kind: None if _is_unchanged(*pair) else pair[1] for kind, pair in graphs.items()},
    )


def _decoded_stage(decoder: Decoder, content: Any) -> RewrittenStage:
    subject = f"stage {int(content['facts']['stage_index'])}"
    traced = _decoded_whole(decoder, content, subject)
    capture = _decoded_capture(decoder, traced, content["facts"])
    with _cutting("a stage"):
        graphs = cut_stage(capture, verify=False)
    cut = {each.kind: each for each in graphs}
    modules = {str(kind): each.graph_module for kind, each in cut.items()}
    changed = _changed_graphs(decoder, content, modules, subject)
    actions = {
        kind: dataclasses.replace(each, graph_module=changed[kind])
        for kind, each in cut.items()
        if kind in changed
    }
    return RewrittenStage.of(graphs, changed=actions)


def _decoded_capture(decoder: Decoder, traced: TracedStep, content: Any) -> StageCapture:
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
    _refuse_problems(f"stage {capture.stage_index}", _misfits(capture))
    return capture


def _misfits(capture: StageCapture) -> list[str]:
    """Return the contradictions between a joint graph and its description in a document."""
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


STAGE_FORM = DocumentForm(name="pipeline stage", content=_stage_content, decoded=_decoded_stage)
"""The form of a pipeline stage before code is generated for its graphs."""

# ---- microbatches of a step ---------------------------------------------------------------------


def _microbatches_content(encoder: Encoder, graphs: AccumulationGraphs) -> dict[str, Any]:
    facts = {"num_results": graphs.num_results, "num_microbatches": graphs.num_microbatches}
    return _content(
        encoder, graphs.traced, facts, {each.role: each.graph_module for each in graphs.graphs}
    )


def _decoded_microbatches(decoder: Decoder, content: Any) -> AccumulationGraphs:
    subject = "a step of microbatches"
    traced = _decoded_whole(decoder, content, subject)
    num_microbatches = content["facts"]["num_microbatches"]
    num_results = content["facts"]["num_results"]
    if not (type(num_microbatches) is int and num_microbatches >= 2):
        raise ArtifactError(f"a step of {num_microbatches!r} microbatches is not cut")
    if not (type(num_results) is int and 0 <= num_results <= len(traced.output_layouts)):
        raise ArtifactError(f"a step has {num_results!r} results of each microbatch")
    with _cutting("a step"):
        cut = cut_tidied(traced, num_results=num_results, num_microbatches=num_microbatches)
    modules = {str(each.role): each.graph_module for each in cut.graphs}
    changed = _changed_graphs(decoder, content, modules, subject)

    def loaded(each: MicrobatchGraph) -> MicrobatchGraph:
        return dataclasses.replace(each, graph_module=changed.get(each.role, each.graph_module))

    return dataclasses.replace(
        cut,
        first=loaded(cut.first),
        further=None if cut.further is None else loaded(cut.further),
        last=loaded(cut.last),
    )


MICROBATCHES_FORM = DocumentForm(
    name="microbatches of a training step",
    content=_microbatches_content,
    decoded=_decoded_microbatches,
)
"""The form of a step of several microbatches before code is generated for its graphs."""

# ---- graphs that passes have changed ------------------------------------------------------------


def _is_unchanged(cut: GraphModule, now: GraphModule) -> bool:
    """Whether a copy of a graph is still that graph, with the very objects as metadata."""
    if cut is now:
        return True
    nodes, others = list(cut.graph.nodes), list(now.graph.nodes)
    if len(nodes) != len(others):
        return False
    same = dict(zip(nodes, others, strict=True))
    return all(_is_same_node(node, other, same) for node, other in same.items())


def _is_same_node(node: Node, other: Node, same: dict[Node, Node]) -> bool:
    if (node.op, node.name, node.target) != (other.op, other.name, other.target):
        return False
    operands = [map_arg(each, same.__getitem__) for each in (node.args, node.kwargs)]
    if operands != [other.args, other.kwargs] or node.meta.keys() != other.meta.keys():
        return False
    if node.op == "get_attr":
        roots = node.graph.owning_module, other.graph.owning_module
        here, there = (attrgetter(str(node.target))(root) for root in roots)
        if here is not there:
            return False
    return all(value is other.meta[key] for key, value in node.meta.items())
