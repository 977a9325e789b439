"""Small random graphs with everything that makes placement hard.

They have parameters (one perhaps tied to two uses), values used twice by one operator, operators
of several outputs, views, repeated layers, a backward that reads forward values, and gradients.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from gt_autoparallel.graph.placement_graph import (
    NodePhase,
    PlacementGraph,
    PlacementNode,
    TensorSpec,
    Value,
)

aten = torch.ops.aten
_SIZE = 64


def spec(*shape: int) -> TensorSpec:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return TensorSpec(shape=shape, stride=tuple(strides), dtype=torch.float32)


class GraphWriter:
    """Writes nodes down and puts share nodes in where a value is read several times."""

    def __init__(self) -> None:
        self._drafts: list[dict[str, Any]] = []

    def add(
        self, kind: str, target: Any, *args: Any, outputs: Sequence[TensorSpec] = (), **more: str
    ) -> Value:
        self._drafts.append({"kind": kind, "target": target, "args": args,
                             "outputs": tuple(outputs), **more})  # fmt: skip
        return Value(len(self._drafts) - 1)

    def graph(self, aliases: dict[str, str]) -> PlacementGraph:
        reads: dict[Value, int] = {}
        for draft in self._drafts:
            for value in _values(draft["args"]):
                reads[value] = reads.get(value, 0) + 1
        nodes: list[PlacementNode] = []
        seen_as: dict[Value, Value] = {}
        for number, draft in enumerate(self._drafts):
            args = _mapped(draft["args"], seen_as)
            name = draft.get("name") or f"{draft.get('module', '')}/{number}"
            nodes.append(PlacementNode(index=len(nodes), **{**draft, "args": args, "name": name}))
            made = len(nodes) - 1
            for position, output in enumerate(draft["outputs"]):
                value = Value(number, position)
                seen_as[value] = Value(made, position)
                if reads.get(value, 0) > 1 or (draft["kind"] == "parameter" and value in reads):
                    nodes.append(
                        PlacementNode(
                            index=len(nodes),
                            name=f"{name}/{position}/share",
                            kind="share",
                            target="",
                            args=(Value(made, position),),
                            outputs=(output,),
                            module=draft.get("module", ""),
                            phase=draft.get("phase", "forward"),
                        )
                    )
                    seen_as[value] = Value(len(nodes) - 1)
        return PlacementGraph(nodes=tuple(nodes), parameter_aliases=aliases)


def _values(args: Any) -> list[Value]:
    if isinstance(args, Value):
        return [args]
    return [v for a in args for v in _values(a)] if isinstance(args, (tuple, list)) else []


def _mapped(args: Any, seen_as: dict[Value, Value]) -> Any:
    if isinstance(args, Value):
        return seen_as[args]
    if isinstance(args, (tuple, list)):
        return type(args)(_mapped(argument, seen_as) for argument in args)
    return args


def random_graph(
    rng: random.Random,
    *,
    num_operators: int,
    num_layers: int,
    runs: Sequence[int] | None = None,
) -> PlacementGraph:
    """A graph of that many forward operators in each of that many layers (0: no layers).

    ``runs`` is the order in which layers run, if it is not that of their names.
    """
    writer = GraphWriter()
    square = spec(_SIZE, _SIZE)

    def weight_of(name: str, module: str) -> Value:
        return writer.add("parameter", name, outputs=[square], name=name, module=module)

    weights = {}
    if not num_layers:
        weights[""] = weight_of("w", "")
    for module in (f"layers.{layer}" for layer in range(num_layers)):
        weights[module] = weight_of(f"{module}.w", module)
    x = writer.add("input", "x", outputs=[square], name="x")
    plan = [rng.choice(("relu", "add", "same", "mm", "tied", "t", "split", "split", "mul"))
            for _ in range(num_operators)]  # fmt: skip
    tangent_wanted = rng.random() < 0.8
    saved: list[tuple[str, Value, Value]] = []
    for module in [f"layers.{layer}" for layer in runs or range(num_layers)] or [""]:
        x = _forward(writer, plan, x, weights[module], module)
        saved.append((module, x, weights[module]))
    writer.add("output", "output", x, name="output")
    if tangent_wanted:
        gradient = writer.add("tangent", "output/tangent", outputs=[square],
                              name="output/tangent", phase="backward")  # fmt: skip
        _backward(writer, rng.choice(("mm", "mul")), gradient, saved, tied=not num_layers)
    aliases = {"also_w": "w"} if "tied" in plan and not num_layers else {}
    return writer.graph(aliases)


def viewing_layers(num_layers: int) -> PlacementGraph:
    """Layers whose backward reads a view of what the layer before made, and nothing else."""
    writer = GraphWriter()
    x = writer.add("input", "x", outputs=[spec(_SIZE, _SIZE)], name="x")
    saved = []
    for module in (f"layers.{layer}" for layer in range(num_layers)):
        name = f"{module}.w"
        weight = writer.add(
            "parameter", name, outputs=[spec(_SIZE, _SIZE)], name=name, module=module
        )
        view = _forward(writer, ["t"], x, weight, module)
        x = _forward(writer, ["relu"], view, weight, module)
        saved.append((module, view, weight))
    writer.add("output", "output", x, name="output")
    gradient = writer.add("tangent", "output/tangent", outputs=[spec(_SIZE, _SIZE)],
                          name="output/tangent", phase="backward")  # fmt: skip
    _backward(writer, "mm", gradient, saved, tied=False)
    return writer.graph({})


def _forward(
    writer: GraphWriter, plan: Sequence[str], x: Value, weight: Value, module: str
) -> Value:
    square, half = spec(_SIZE, _SIZE), spec(_SIZE // 2, _SIZE)

    def run(target: Any, *args: Any, outputs: Sequence[TensorSpec] = (square,)) -> Value:
        return writer.add("operator", target, *args, outputs=outputs, module=module)

    before = x
    for word in plan:
        if word == "relu":
            x = run(aten.relu.default, x)
        elif word == "t":
            transposed = TensorSpec(shape=square.shape, stride=(1, _SIZE), dtype=torch.float32)
            x = run(aten.t.default, x, outputs=(transposed,))
        elif word == "add":
            x = run(aten.add.Tensor, x, before)
        elif word == "same":
            x = run(aten.mul.Tensor, x, x)
        elif word == "mul":
            x = run(aten.mul.Tensor, x, weight)
        elif word == "split":
            parts = run(aten.split.Tensor, x, _SIZE // 2, outputs=(half, half))
            x = run(aten.cat.default, [Value(parts.node, 1), Value(parts.node, 0)])
        else:
            x = run(aten.mm.default, x, weight)
    return x


def _backward(
    writer: GraphWriter,
    word: str,
    gradient: Value,
    saved: Sequence[tuple[str, Value, Value]],
    *,
    tied: bool,
) -> None:
    square = spec(_SIZE, _SIZE)
    phase: NodePhase = "backward"
    target = aten.mm.default if word == "mm" else aten.mul.Tensor
    for module, value, weight in reversed(saved):
        of_weight = writer.add("operator", target, value, gradient, outputs=[square],
                               module=module, phase=phase)  # fmt: skip
        name = "w" if tied else f"{module}.w"
        writer.add("gradient", name, of_weight, name=f"{name}/gradient", module=module, phase=phase)
        if len(saved) > 1:
            gradient = writer.add("operator", aten.mm.default, gradient, weight, outputs=[square],
                                  module=module, phase=phase)  # fmt: skip
