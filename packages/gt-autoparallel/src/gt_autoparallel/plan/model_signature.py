"""What a plan was made for, and in what another model differs from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from torch import nn

from gt_autoparallel.graph.graph_encoding import encode_graph, graph_digest
from gt_autoparallel.graph.placement_graph import (
    InputLeaf,
    ModelInterface,
    PlacementGraph,
    ResultLeaf,
)
from gt_autoparallel.plan.placement_plan import ModelSignature, PlacementPlan

_MAX_LISTED = 5
_IN_EVALUATION = " in evaluation mode"


def model_signature(model: nn.Module, graph: PlacementGraph) -> ModelSignature:
    """The signature of a model and of the graph that was captured from it."""
    return ModelSignature(
        parameters=_tensors(model), modules=_modules(model), graph_digest=graph_digest(graph)
    )


def model_differences(plan: PlacementPlan, model: nn.Module) -> list[str]:
    """One line for each parameter, buffer or module that a plan and a model do not share.

    A layer around an expert block may be in either mode: it is captured without counting its
    tokens, and counts them when it runs.
    """
    planned, found = dict(plan.signature.modules), _modules(model)
    for node in plan.graph.of_kind("experts"):
        around = str(node.target).rpartition(".")[0]
        for modules in (planned, found):
            if around in modules:
                modules[around] = modules[around].removesuffix(_IN_EVALUATION)
    return [
        *_named_differences(plan.signature.parameters, _tensors(model)),
        *_named_differences(planned, found),
    ]


def _tensors(model: nn.Module) -> dict[str, str]:
    """Shape and dtype of every parameter and buffer, under each of its names, as text."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    return {
        name: ("frozen " if name in frozen else "")
        + f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for name, tensor in tensors.items()
    }


def _modules(model: nn.Module) -> dict[str, str]:
    """Class and mode of every module, as text."""
    return {
        name: type(module).__qualname__ + ("" if module.training else _IN_EVALUATION)
        for name, module in model.named_modules()
    }


def _named_differences(planned: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    lines = [
        f"{name or 'the model'} is {found[name]}, planned for {planned[name]}"
        for name in sorted(planned.keys() & found.keys())
        if planned[name] != found[name]
    ]
    lines += [f"{name} is missing" for name in sorted(planned.keys() - found.keys())]
    lines += [f"{name} was not planned" for name in sorted(found.keys() - planned.keys())]
    return _shortened(lines)


def graph_differences(planned: PlacementGraph, found: PlacementGraph) -> list[str]:
    """One line for each of the first nodes in which two graphs differ; empty for equal graphs."""
    return _shortened(list(_node_differences(planned, found)))


def _node_differences(planned: PlacementGraph, found: PlacementGraph) -> Iterator[str]:
    old, new = encode_graph(planned), encode_graph(found)
    for left, right in zip(old["nodes"], new["nodes"], strict=False):
        for field in left:
            if left[field] != right[field]:
                yield (
                    f"node {right['name']!r}: {field} is {right[field]!r}, "
                    f"planned for {left[field]!r}"
                )
    if len(old["nodes"]) != len(new["nodes"]):
        yield f"{len(new['nodes'])} nodes, planned for {len(old['nodes'])}"
    if old["parameter_aliases"] != new["parameter_aliases"]:
        yield (
            f"tied parameters are {new['parameter_aliases']!r}, "
            f"planned for {old['parameter_aliases']!r}"
        )


def interface_differences(planned: ModelInterface, found: ModelInterface) -> list[str]:
    """One line for each of the first differences between what two equal graphs take and return.

    Constants among arguments and results are in no graph, nor is the structure of either.
    """
    lines: list[str] = []
    if found.input_spec == planned.input_spec:
        for argument, new_argument in zip(planned.inputs, found.inputs, strict=True):
            lines += _leaf_differences(argument, new_argument)
    else:
        lines.append(
            f"arguments have the structure {found.input_spec}, planned for {planned.input_spec}"
        )
    if found.output_spec == planned.output_spec:
        for result, new_result in zip(planned.outputs, found.outputs, strict=True):
            lines += _leaf_differences(result, new_result)
    else:
        lines.append(
            f"results have the structure {found.output_spec}, planned for {planned.output_spec}"
        )
    return _shortened(lines)


def _leaf_differences(
    planned: InputLeaf | ResultLeaf, found: InputLeaf | ResultLeaf
) -> Iterator[str]:
    for field in fields(planned):
        old, new = getattr(planned, field.name), getattr(found, field.name)
        if type(new) is not type(old) or (new is not old and new != old):
            yield f"{found.name}: {field.name} is {new!r}, planned for {old!r}"


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LISTED:
        return lines
    return [*lines[:_MAX_LISTED], f"and {len(lines) - _MAX_LISTED} more"]
