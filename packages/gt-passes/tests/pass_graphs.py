"""What the tests of passes share: capturing small graphs, showing them, and running passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes import GraphPass, PassContext, PassManager, PassReport
from gt_trace.annotate import annotate

collectives = torch.ops._c10d_functional


def capture(fn: Callable[..., object], *args: torch.Tensor) -> GraphModule:
    """The graph of a function of plain tensors, as a captured step has it."""
    with preserve_node_meta():
        return make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def capture_dead(
    fn: Callable[..., tuple[object, ...]], *args: torch.Tensor, alive: int
) -> GraphModule:
    """The graph of a function of which only the first results are used.

    ``make_fx`` would leave unused nodes out itself; here they stay, and nothing reads them.
    """
    graph_module = capture(fn, *args)
    (output,) = graph_module.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0][:alive]),)
    graph_module.recompile()
    return graph_module


def unshard(
    weight: torch.Tensor, *, group: str, num_ranks: int = 1, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gather a parameter as simple FSDP does, annotated."""
    with annotate(
        FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="fsdp")
    ):
        if dtype is not None:
            weight = weight.to(dtype)
        gathered = collectives.all_gather_into_tensor(weight, num_ranks, group)
        return collectives.wait_tensor(gathered)


def run_pass(graph_pass: GraphPass, graph_module: GraphModule) -> PassReport:
    """Run one pass as the pass manager does, verified."""
    context = PassContext.from_graph(graph_module)
    (record,) = PassManager([graph_pass], context=context).run(graph_module).records
    return record.report


def program(graph_module: GraphModule) -> str:
    """The graph in one line a node, without what differs between versions of torch."""
    lines = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        elif node.op == "call_function":
            arguments = [_text(argument) for argument in node.args]
            arguments += [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
            lines.append(f"{node.name} = {_op(node)}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def node_of(graph_module: GraphModule, name: str) -> Node:
    """The node with that name."""
    (found,) = [node for node in graph_module.graph.nodes if node.name == name]
    return found


def same_bits(first: object, second: object) -> bool:
    """Whether two results agree in every bit, strides and dtype."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (
            first.shape == second.shape
            and first.stride() == second.stride()
            and first.dtype == second.dtype
            and torch.equal(_bytes(first), _bytes(second))
        )
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(same_bits, first, second))
    return first == second


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.resolve_conj().reshape(-1).contiguous().view(torch.uint8)
    )  # so that NaN equals itself


def _op(node: Node) -> str:
    return str(node.target) if hasattr(node.target, "_schema") else node.target.__name__


def _text(argument: object) -> str:
    if isinstance(argument, (tuple, list)):
        return "[" + ", ".join(map(_text, argument)) + "]"
    return str(argument)
