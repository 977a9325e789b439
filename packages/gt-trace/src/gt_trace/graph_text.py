"""A captured graph as text that a person can read and two texts that a tool can compare.

PyTorch's ``print_readable`` shows everything; on a model of thousands of nodes that hides what one
looks for. Here: one line a node, grouped under the module and phase it belongs to, collectives
with the mesh axis and parameters they serve. The text depends on nothing but the graph, so equal
graphs give equal texts on every rank and machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gt_config.node_keys import (
    EpExchangeAnnotation,
    EpRegionAnnotation,
    FsdpCollectiveAnnotation,
)
from gt_trace.node_metadata import module_fqn, phase_of, read_annotation

_SHORT_DTYPE = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def graph_text(graph_module: GraphModule, *, stack_traces: bool = False) -> str:
    """The graph as text, one line a node.

    Args:
        graph_module: as ``trace_step`` made it, before or after passes.
        stack_traces: also give the innermost source line of each node where it changes.

    Example line: ``mm_3: f32[8, 16] = aten.mm.default(view_1, t_1)``
    """
    return "\n".join(_lines(graph_module, stack_traces=stack_traces)) + "\n"


def collective_counts(graph_module: GraphModule) -> dict[str, int]:
    """How often each communication operator occurs, by its short name, sorted by name.

    Waits are not counted. Submodule graphs are included.
    """
    counts: Counter[str] = Counter()
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace.startswith(
                ("_c10d_functional", "c10d")
            ):
                name = target._schema.name.split("::")[1]
                if name != "wait_tensor":
                    counts[name] += 1
    return dict(sorted(counts.items()))


def _lines(graph_module: GraphModule, *, stack_traces: bool) -> Iterator[str]:
    section: tuple[str, str] | None = None
    source = ""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            yield f"input {node.name}: {_value(node.meta.get('val'))}"
            continue
        if node.op == "output":
            yield f"return {_argument(node.args[0])}"
            continue
        where = (phase_of(node) or "", module_fqn(node))
        if where != section:
            section = where
            yield f"# {where[0]} {where[1]}".rstrip()
        if stack_traces:
            line = _innermost_source(node)
            if line and line != source:
                source = line
                yield f"    # {line}"
        yield f"    {_call(node)}{_marks(node)}"


def _call(node: Node) -> str:
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{name}={_argument(a)}" for name, a in node.kwargs.items()]
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
    return f"{node.name}: {_value(node.meta.get('val'))} = {name}({', '.join(arguments)})"


def _marks(node: Node) -> str:
    marks: list[str] = []
    collective = read_annotation(node, FsdpCollectiveAnnotation)
    if collective is not None:
        names = ", ".join(collective.parameter_names)
        marks.append(f"fsdp {collective.kind} {names} over {collective.mesh_axis}")
    region = read_annotation(node, EpRegionAnnotation)
    if region is not None:
        marks.append(f"ep {region.kind}")
    exchange = read_annotation(node, EpExchangeAnnotation)
    if exchange is not None:
        marks.append(exchange.kind)
    return f"  # {'; '.join(marks)}" if marks else ""


def _argument(argument: Any) -> str:
    if isinstance(argument, Node):
        return argument.name
    if isinstance(argument, list | tuple):
        inner = ", ".join(_argument(a) for a in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    return str(argument) if isinstance(argument, torch.dtype | torch.device) else repr(argument)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_SHORT_DTYPE.get(value.dtype, str(value.dtype))}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_value(v) for v in value) + ")"
    return type(value).__name__ if value is None else str(value)


def _innermost_source(node: Node) -> str:
    """``model.py:41 in forward: h = self.norm(x)``, without folders, so that it is portable."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith('File "'):
            file, _, rest = lines[at][len('File "') :].partition('", line ')
            number, _, function = rest.partition(", in ")
            code = lines[at + 1] if at + 1 < len(lines) else ""
            return f"{file.rsplit('/', 1)[-1]}:{number} in {function}: {code}"
    return ""
