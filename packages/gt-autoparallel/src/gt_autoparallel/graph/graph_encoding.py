"""A placement graph and its layouts as JSON values and back, and the digest of a graph.

A plan file holds its graph, so that a plan can be read, audited and compared where its model is
not; and a plan is checked against a model by the digest of the graph that the model gives.
Constants among the arguments are tagged with their type (``{"dtype": "bfloat16"}``), because JSON
knows neither dtypes nor tuples nor infinities.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel._torch_internals import (
    HigherOrderOperator,
    OpOverload,
    operator_name,
    operator_path,
)
from gt_autoparallel.errors import PlanMismatchError, UnsupportedModelError
from gt_autoparallel.graph.function_graph import FunctionGraph, FunctionStep
from gt_autoparallel.graph.layouts import Layout, short_text
from gt_autoparallel.graph.placement_graph import (
    NodeKind,
    NodePhase,
    PlacementGraph,
    PlacementNode,
    TensorSpec,
    Value,
)

JsonObject = dict[str, Any]

_TORCH_CONSTANTS: tuple[tuple[str, type], ...] = (
    ("dtype", torch.dtype),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)
_MAKE_ONE_TENSOR: tuple[NodeKind, ...] = ("parameter", "buffer", "input", "tangent", "share")
_PLACEMENT = re.compile(r"R|S\((\d+)\)|P\((\w+)\)")


def canonical_json(content: object) -> bytes:
    """The one spelling of a JSON value, of which digests are made: sorted keys, no spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def graph_digest(graph: PlacementGraph) -> str:
    """SHA-256 over all of a graph: names, operators, arguments, shapes, strides and dtypes."""
    return hashlib.sha256(canonical_json(encode_graph(graph))).hexdigest()


def spec_text(spec: TensorSpec) -> str:
    """A tensor in words: ``bfloat16[4096, 1024]``."""
    return f"{_short_dtype(spec.dtype)}{list(spec.shape)}"


def encode_graph(graph: PlacementGraph) -> JsonObject:
    """The graph as JSON values.

    Raises:
        UnsupportedModelError: an argument of a node is of a type that cannot be written down.
    """
    return {
        "nodes": [_encode_node(node) for node in graph.nodes],
        "parameter_aliases": dict(graph.parameter_aliases),
    }


def decode_graph(content: Mapping[str, Any]) -> PlacementGraph:
    """The graph that ``encode_graph`` wrote.

    Raises:
        PlanMismatchError: it names an operator that this PyTorch does not have.
    """
    nodes = tuple(_decode_node(index, node) for index, node in enumerate(content["nodes"]))
    aliases = {str(alias): str(name) for alias, name in content["parameter_aliases"].items()}
    return PlacementGraph(nodes=nodes, parameter_aliases=aliases)


def encode_layout(layout: Layout | None) -> str | None:
    """``"S(0) R"``, as people read it; None stays None."""
    return None if layout is None else short_text(layout)


def decode_layout(text: str | None) -> Layout | None:
    """The layout that ``encode_layout`` wrote.

    Raises:
        PlanMismatchError: no layout reads like this.
    """
    return None if text is None else tuple(_placement(word) for word in text.split(" "))


def _placement(word: str) -> Placement:
    match = _PLACEMENT.fullmatch(word)
    if match is None:
        raise PlanMismatchError(f"placement {word!r}; allowed: R, S(dim), P(sum)")
    if match[1] is not None:
        return Shard(int(match[1]))
    return Partial(match[2]) if match[2] is not None else Replicate()


def _encode_node(node: PlacementNode) -> JsonObject:
    where = f"node {node.name} ({node.target})"
    return {
        "name": node.name,
        "kind": node.kind,
        "target": _encode_target(node.target, where),
        "args": [_encode_argument(argument, where) for argument in node.args],
        "kwargs": {key: _encode_argument(value, where) for key, value in node.kwargs.items()},
        "outputs": [None if spec is None else _encode_spec(spec) for spec in node.outputs],
        "module": node.module,
        "phase": node.phase,
    }


def _decode_node(index: int, content: Mapping[str, Any]) -> PlacementNode:
    kind: NodeKind = content["kind"]
    phase: NodePhase = content["phase"]
    if kind not in get_args(NodeKind) or phase not in get_args(NodePhase):
        raise PlanMismatchError(f"node {content['name']!r} is of kind {kind!r}, phase {phase!r}")
    if kind in _MAKE_ONE_TENSOR and (len(content["outputs"]) != 1 or not content["outputs"][0]):
        raise PlanMismatchError(f"node {content['name']!r} is of kind {kind!r} and makes no tensor")
    return PlacementNode(
        index=index,
        name=content["name"],
        kind=kind,
        target=_decode_target(content["target"]),
        args=tuple(_decode_argument(argument) for argument in content["args"]),
        kwargs={key: _decode_argument(value) for key, value in content["kwargs"].items()},
        outputs=tuple(None if spec is None else _decode_spec(spec) for spec in content["outputs"]),
        module=content["module"],
        phase=phase,
    )


def _encode_spec(spec: TensorSpec) -> JsonObject:
    return {
        "shape": list(spec.shape),
        "stride": list(spec.stride),
        "dtype": _short_dtype(spec.dtype),
    }


def _decode_spec(content: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(
        shape=tuple(content["shape"]),
        stride=tuple(content["stride"]),
        dtype=_torch_constant("dtype", content["dtype"]),
    )


def _encode_target(target: object, where: str) -> object:
    if target is None or isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return {"operator": list(operator_path(target))}
    if isinstance(target, HigherOrderOperator):
        return {"operator": operator_name(target).split(".")}
    raise UnsupportedModelError(f"{where} calls a {type(target).__name__}, which no file can name")


def _decode_target(content: Any) -> object:
    if content is None or isinstance(content, str):
        return content
    path = content["operator"]
    target: object = torch.ops
    for part in path:
        target = getattr(target, part, None)
    if target is None:
        raise PlanMismatchError(
            f"operator {'.'.join(path)!r} does not exist in PyTorch {torch.__version__}; plan again"
        )
    return target


def _encode_argument(argument: object, where: str) -> object:
    """One argument; what is more than a JSON scalar becomes an object of a single key."""
    match argument:
        case None | bool() | int() | str():
            return argument
        case float():
            return argument if math.isfinite(argument) else {"float": repr(argument)}
        case Value():
            return {"value": [argument.node, argument.output]}
        case FunctionGraph():
            return {"function": _encode_function(argument, where)}
        case list():
            return [_encode_argument(each, where) for each in argument]
        case tuple():
            return {"tuple": [_encode_argument(each, where) for each in argument]}
        case dict():
            return {"dict": {str(k): _encode_argument(v, where) for k, v in argument.items()}}
        case torch.device():
            return {"device": str(argument)}
    for tag, kind in _TORCH_CONSTANTS:
        if isinstance(argument, kind):
            return {tag: str(argument).removeprefix("torch.")}
    raise UnsupportedModelError(
        f"{where} has an argument of type {type(argument).__name__}: {argument!r}; allowed: "
        "tensors, numbers, strings, dtypes, devices, and lists, tuples and dictionaries of them"
    )


def _decode_argument(content: Any) -> object:
    if isinstance(content, list):
        return [_decode_argument(each) for each in content]
    if not isinstance(content, dict):
        return content
    ((tag, inner),) = content.items()
    match tag:
        case "value":
            return Value(inner[0], inner[1])
        case "function":
            return _decode_function(inner)
        case "float":
            return float(inner)
        case "tuple":
            return tuple(_decode_argument(each) for each in inner)
        case "dict":
            return {key: _decode_argument(value) for key, value in inner.items()}
        case "device":
            return torch.device(inner)
        case _:
            return _torch_constant(tag, inner)


def _encode_function(function: FunctionGraph, where: str) -> JsonObject:
    return {
        "num_inputs": function.num_inputs,
        "steps": [
            {
                "target": _encode_target(step.target, where),
                "args": [_encode_argument(argument, where) for argument in step.args],
                "kwargs": {k: _encode_argument(v, where) for k, v in step.kwargs.items()},
            }
            for step in function.steps
        ],
        "result": _encode_argument(function.result, where),
    }


def _decode_function(content: Mapping[str, Any]) -> FunctionGraph:
    steps = [
        FunctionStep(
            target=_decode_operator(step["target"]),
            args=tuple(_decode_argument(argument) for argument in step["args"]),
            kwargs={key: _decode_argument(value) for key, value in step["kwargs"].items()},
        )
        for step in content["steps"]
    ]
    return FunctionGraph(
        num_inputs=content["num_inputs"],
        steps=tuple(steps),
        result=_decode_argument(content["result"]),
    )


def _decode_operator(content: Any) -> OpOverload | None:
    operator = _decode_target(content)
    if operator is not None and not isinstance(operator, OpOverload):
        raise PlanMismatchError(f"a function calls {content!r}, which is no operator")
    return operator


def _torch_constant(tag: str, name: str) -> Any:
    kinds = dict(_TORCH_CONSTANTS)
    constant = getattr(torch, name, None)
    if tag not in kinds or not isinstance(constant, kinds[tag]):
        raise PlanMismatchError(
            f"{tag} {name!r} does not exist in PyTorch {torch.__version__}; plan again"
        )
    return constant


def _short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
