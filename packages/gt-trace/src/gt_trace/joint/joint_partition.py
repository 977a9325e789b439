"""A joint graph cut in two: a forward graph, and a backward graph that runs when autograd says so.

The cut decides what is kept in between. It is made by torch's own partitioners
(torch/_functorch/partitioners.py), which torch.compile uses too: one that keeps everything, and one
that finds the fewest bytes from which the rest can be computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tag
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from gt_config import JointPartitioner
from gt_config.node_keys import FsdpCollectiveAnnotation, PhaseAnnotation
from gt_trace._torch_joint_internals import (
    default_partition,
    min_cut_rematerialization_partition,
)
from gt_trace.capture.graph_inputs import GraphInput, name_placeholders
from gt_trace.errors import CaptureError
from gt_trace.joint.bound_joint import ForwardBackward
from gt_trace.joint.joint_graph import GraphResult, JointGraph
from gt_trace.node_metadata import is_backward, read_annotation, write_annotation

GatheredParameters = Literal["save", "gather_again"]


def partition(
    joint: JointGraph,
    *,
    partitioner: JointPartitioner = "min_cut",
    gathered_parameters: GatheredParameters | None = None,
) -> ForwardBackward:
    """Cut ``joint`` in a forward and a backward graph; the joint graph stays as it is.

    Args:
        joint: what ``export_joint_graph`` returned.
        partitioner: "min_cut" keeps the fewest bytes between the two and lets the backward compute
            the rest again; random operators, matrix products and collectives are never repeated.
            "save_all" repeats nothing.
        gathered_parameters: what becomes of parameters that data parallelism gathers for the
            forward: "save" keeps them whole until the backward, "gather_again" keeps the shards and
            repeats the collectives. None: "gather_again" for "min_cut", "save" for "save_all".

    Raises:
        ValueError: a choice is unknown.
        CaptureError: the backward would repeat a random operator.
    """
    if partitioner not in ("min_cut", "save_all"):
        raise ValueError(f"partitioner is {partitioner!r}; allowed: 'min_cut', 'save_all'")
    if gathered_parameters not in (None, "save", "gather_again"):
        raise ValueError(
            f"gathered_parameters is {gathered_parameters!r}; allowed: 'save', 'gather_again', None"
        )
    if gathered_parameters is None:
        gathered_parameters = "gather_again" if partitioner == "min_cut" else "save"
    graph_module = GraphModule(joint.graph_module, copy.deepcopy(joint.graph_module.graph))
    if gathered_parameters == "gather_again":
        _mark_gathering(graph_module)
    inputs = _rename_for_partitioner(graph_module, joint.inputs)
    primals = [each for each in joint.inputs if each.kind != "tangent"]
    cut = min_cut_rematerialization_partition if partitioner == "min_cut" else default_partition
    forward, backward = cut(
        graph_module,
        None,
        num_fwd_outputs=joint.num_forward_results,
        static_lifetime_input_indices=[
            index for index, each in enumerate(primals) if each.kind in ("parameter", "buffer")
        ],
    )
    _refuse_repeated_effects(forward, backward)
    return _described(joint, forward, backward, inputs)


def _refuse_repeated_effects(forward: GraphModule, backward: GraphModule) -> None:
    """Take out of the backward what the partitioner repeated for nothing.

    torch's partitioners count a random operator as one with an effect, and leave a copy of it in
    the backward although nothing reads it. It would draw numbers that eager execution does not.

    Raises:
        CaptureError: a random operator is repeated whose results are read; they would differ.
    """
    done = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    problems: list[str] = []
    for node in reversed(backward.graph.nodes):
        if node.op != "call_function" or node.name not in done:
            continue
        if not node.users:
            backward.graph.erase_node(node)
        elif _is_random(node):
            problems.append(f"{node.name} ({node.target})")
    if problems:
        raise CaptureError(
            "the backward would repeat random operators, with other numbers than the forward; use "
            "partitioner='save_all':\n  " + "\n  ".join(problems)
        )


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and (Tag.nondeterministic_seeded in node.target.tags)


def _mark_gathering(graph_module: GraphModule) -> None:
    """Let the partitioner compute again what gathers parameters, and views of what was gathered."""
    marked: set[Node] = set()
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or is_backward(node):
            continue
        collective = read_annotation(node, FsdpCollectiveAnnotation)
        gathers = collective is not None and collective.kind == "unshard"
        # A view keeps the whole parameter alive, as the parameter itself would.
        is_view = isinstance(node.target, OpOverload) and node.target.is_view
        if gathers or (is_view and any(source in marked for source in node.all_input_nodes)):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            marked.add(node)


def _rename_for_partitioner(
    graph_module: GraphModule, inputs: Sequence[GraphInput]
) -> dict[str, GraphInput]:
    """The partitioners tell tangents by their names; returns what stands behind each name."""
    meanings: dict[str, GraphInput] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for index, (node, meaning) in enumerate(zip(placeholders, inputs, strict=True)):
        node._rename(f"{'tangents' if meaning.kind == 'tangent' else 'primals'}_{index}")
        node.target = node.name
        meanings[node.name] = meaning
    return meanings


def _described(
    joint: JointGraph,
    forward: GraphModule,
    backward: GraphModule,
    inputs: dict[str, GraphInput],
) -> ForwardBackward:
    num_computed = joint.num_forward_results
    saved = [_saved_name(node, inputs) for node in _results(forward)[num_computed:]]
    forward_inputs = tuple(inputs[node.name] for node in forward.graph.find_nodes(op="placeholder"))
    backward_inputs: list[GraphInput] = []
    for node in backward.graph.find_nodes(op="placeholder"):
        meaning = inputs.get(str(node.target))
        if meaning is None or meaning.kind != "tangent":
            meaning = GraphInput(kind="saved", name=_saved_name(node, inputs))
            assert meaning.name in saved
        backward_inputs.append(meaning)
    gradients = joint.results[num_computed:]
    assert len(gradients) == len(_results(backward))
    _settle_phase(forward, PhaseAnnotation(phase="forward"))
    _settle_phase(backward, PhaseAnnotation(phase="backward"))
    name_placeholders(forward.graph, forward_inputs)
    name_placeholders(backward.graph, backward_inputs)
    forward.recompile()
    backward.recompile()
    as_cut = None
    if sum(each.kind == "tangent" for each in backward_inputs) > 1:
        as_cut = GraphModule(backward, copy.deepcopy(backward.graph))
    return ForwardBackward(
        joint=joint,
        forward=forward,
        forward_inputs=forward_inputs,
        forward_results=(
            *joint.results[:num_computed],
            *(GraphResult(kind="saved", name=name) for name in saved),
        ),
        backward=backward,
        backward_inputs=tuple(backward_inputs),
        backward_results=gradients,
        backward_as_cut=as_cut,
    )


def _saved_name(node: Node, inputs: dict[str, GraphInput]) -> str:
    """The name of a saved value in both graphs: that of its node, or of the input that it is."""
    name = str(node.target) if node.op == "placeholder" else node.name
    meaning = inputs.get(name)
    if meaning is None:
        return name
    return f"{meaning.kind} {meaning.name}" + (f" {meaning.leaf}" if meaning.leaf else "")


def _results(graph_module: GraphModule) -> Sequence[Any]:
    values: Any = graph_module.graph.output_node().args[0]
    return tuple(values)


def _settle_phase(graph_module: GraphModule, phase: PhaseAnnotation) -> None:
    """What is computed again in the backward belongs to the backward."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("recompute", None)  # for the partitioner alone, which is done
                if node.op not in ("placeholder", "output"):
                    write_annotation(node, phase)
