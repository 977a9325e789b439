"""Why a node cannot be part of a CUDA graph.

A CUDA graph replays kernels, with the addresses and sizes that they had when recorded. Whatever the
host does besides launching them (reading a result, deciding a size, computing on CPU) happens once,
while recording, and never again: the replay is then silently wrong. Every rule here says no unless
PyTorch says what makes yes safe.

Sources: PyTorch, ``torch/cuda/graphs.py`` and the notes on CUDA graphs;
``torch/_inductor/cudagraph_utils.py``; ``torch/distributed/_symmetric_memory/__init__.py``, whose
fused operators ask whether they are being recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_compilation_internals import process_group_backend
from gt_passes._torch_internals import HigherOrderOperator, OpOverload, value_of
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.bucket_copies import BUCKET_COPIES
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.host_copies import OFFLOAD, is_host_copy
from gt_passes.analysis.outlined_region import region_of
from gt_passes.analysis.tensor_signature import is_symbolic, signature

_aten = torch.ops.aten

_KNOWN_NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "_c10d_functional_autograd"})
_CAPTURABLE_HIGHER_ORDER = frozenset({"flex_attention", "flex_attention_backward"})
_CAPTURABLE_SYMMETRIC = frozenset(
    {
        "symm_mem::fused_all_gather_matmul",
        "symm_mem::fused_matmul_reduce_scatter",
        "symm_mem::fused_scaled_matmul_reduce_scatter",
    }
)
"""They fork to a stream of their own and join it, wait for other ranks in kernels, and use one
workspace for each group, which is as large as it has to be once every size has run."""

_SYNCHRONIZES = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"})
_COPIES = frozenset({"_to_copy", "copy_", "copy"})
_TAKES_MASK = frozenset({"index", "index_put", "index_put_", "_unsafe_index_put"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A node that cannot be recorded, and why."""

    node: Node
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTarget:
    """What graphs are recorded for, and what is promised about operators and groups."""

    device_type: str = "cuda"
    """The device whose work is recorded. A test records on "cpu"."""

    compute_capability: tuple[int, int] | None = None
    """The CUDA device's, as (9, 0); None for that of this machine."""

    backend_of_group: Callable[[str], str | None] = process_group_backend
    """The backend of a process group by name, as "nccl"; None where it is not known."""

    capturable_backends: frozenset[str] = frozenset({"nccl"})
    """Backends whose collectives are kernels."""

    safe_operators: frozenset[str] = frozenset()
    """Custom operators, as ``my_lib::fused_norm``, of which the caller knows that they only launch
    kernels."""


def find_obstacles(
    graph_module: GraphModule,
    target: CaptureTarget,
    *,
    num_static_inputs: int,
    left_out: Mapping[Node, str] | None = None,
    in_region: bool = False,
) -> tuple[Obstacle, ...]:
    """Every node that cannot be recorded, in execution order, with the first reason found.

    Args:
        graph_module: with fake values.
        target: what to record for.
        num_static_inputs: leading placeholders whose tensors keep their addresses.
        left_out: nodes that somebody has other reasons not to record, and these.
        in_region: the graph is what a compiler was given, and runs as one program.
    """
    judge = _Judge(graph_module, target, num_static_inputs, left_out or {}, in_region)
    return tuple(judge.obstacles())


class _Judge:
    def __init__(
        self,
        graph_module: GraphModule,
        target: CaptureTarget,
        num_static_inputs: int,
        left_out: Mapping[Node, str],
        in_region: bool,
    ) -> None:
        self._graph_module = graph_module
        self._target = target
        self._left_out = left_out
        self._in_region = in_region
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        self._moving: set[Node] = set(placeholders[num_static_inputs:])
        """Values at an address that differs from step to step: inputs, and what runs on its own."""
        self._host_constants: set[Node] = set()
        """Values on the host that are the same in every step."""
        self._aliases = AliasClasses(graph_module.graph)
        (output,) = graph_module.graph.find_nodes(op="output")
        self._outputs_with_gaps = {
            self._aliases.class_of(result): result
            for result in output.all_input_nodes
            if not all(map(_copy_keeps_strides, _tensors(value_of(result))))
        }

    def obstacles(self) -> Iterator[Obstacle]:
        for node in self._graph_module.graph.nodes:
            if node.op == "get_attr":
                if not self._aliases.is_written(node):
                    self._host_constants.add(node)
            elif node.op == "call_function":
                reason = self._left_out.get(node) or self._reason(node)
                if reason is not None:
                    self._moving.add(node)
                    yield Obstacle(node=node, reason=reason)

    def _reason(self, node: Node) -> str | None:
        """Why a call cannot be recorded; None if it can."""
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, Node):
            if source in self._moving:
                return f"it is an item of {source.name}, which is not recorded"
            return None
        result = self._outputs_with_gaps.get(self._aliases.class_of(node))
        if result is not None:
            return f"it shares memory with the output {result.name}, whose strides no copy keeps"
        region = region_of(node)
        if region is not None:
            inner = next(_inner_obstacles(region.body, self._target), None)
            if inner is not None:
                return f"inside it, {inner.node.name}: {inner.reason}"
            return self._reason_of_memory(node)
        if is_host_copy(node):
            return self._reason_of_host_copy(node) or self._reason_of_memory(node)
        return (
            self._reason_of_operator(node)
            or self._reason_of_host_memory(node)
            or self._reason_of_memory(node)
        )

    def _reason_of_operator(self, node: Node) -> str | None:
        target = node.target
        if isinstance(target, HigherOrderOperator):
            if str(target) in _CAPTURABLE_HIGHER_ORDER:
                return None
            return f"nothing is known of what {target} does"
        if not isinstance(target, OpOverload):
            return f"{getattr(target, '__name__', target)} runs on the host"
        name = target._schema.name
        operator_name = _operator_name(node)
        if torch.Tag.cudagraph_unsafe in target.tags:
            return f"{name} is tagged cudagraph_unsafe"
        is_known = target.namespace in _KNOWN_NAMESPACES or target in BUCKET_COPIES
        is_safe = name in _CAPTURABLE_SYMMETRIC or name in self._target.safe_operators
        if not is_known and not is_safe:
            return f"{name} is a custom operator that nobody has declared safe to record"
        if operator_name in _SYNCHRONIZES or torch.Tag.data_dependent_output in target.tags:
            return f"{name} brings a result of the device to the host"
        if torch.Tag.dynamic_output_shape in target.tags and is_symbolic(signature(value_of(node))):
            return f"the size of what {name} makes depends on data"
        if operator_name in _TAKES_MASK and _has_mask(node):
            return f"{name} counts the true elements of a mask on the host"
        if operator_name == "_grouped_mm" and _compute_capability(self._target) < (10, 0):
            return f"{name} may copy its offsets to the host below compute capability 10.0"
        if any(isinstance(value, torch.Generator) for value in _leaves(node)):
            return f"{name} draws from a generator whose state is not registered with the graph"
        if is_collective(node):
            return self._reason_of_collective(node)
        values = [value_of(node), *(value_of(argument) for argument in node.all_input_nodes)]
        if any(is_symbolic(signature(value)) for value in values):
            return f"sizes that {name} reads or makes depend on data"
        return None

    def _reason_of_host_copy(self, node: Node) -> str | None:
        """Whether a copy ends, or begins, in host memory that is not where it was."""
        source = node.args[0]
        assert isinstance(source, Node)  # by the schema
        if any(is_symbolic(signature(value_of(each))) for each in (node, source)):
            return f"the size of {source.name} depends on data"
        if node.target is not OFFLOAD:
            if source in self._moving:
                return f"it copies {source.name}, whose address changes"
            return None
        if self._in_region:
            return "a compiled program makes new host memory for what it copies there"
        return None

    def _reason_of_collective(self, node: Node) -> str | None:
        group = _group_name(node)
        backend = None if group is None else self._target.backend_of_group(group)
        if backend is None:
            return f"the backend of its process group {group!r} is not known"
        if backend not in self._target.capturable_backends:
            return f"it runs over {backend}, whose collectives run on the host"
        return None

    def _reason_of_host_memory(self, node: Node) -> str | None:
        device_type = self._target.device_type
        made = [tensor.device.type for tensor in _tensors(value_of(node))]
        if any(kind != device_type for kind in made):
            if all(source in self._host_constants for source in node.all_input_nodes):
                # Made once, while recording: the same in every step.
                self._host_constants.add(node)
                return None
            on_device = any(
                tensor.device.type == device_type
                for source in node.all_input_nodes
                for tensor in _tensors(value_of(source))
            )
            if on_device:
                return f"it copies from {device_type} to newly allocated host memory"
            return f"it runs on {'/'.join(sorted(set(made)))}"
        for source in node.all_input_nodes:
            elsewhere = [
                tensor for tensor in _tensors(value_of(source)) if tensor.device.type != device_type
            ]
            if not elsewhere:
                continue
            if source in self._host_constants and _operator_name(node) not in _COPIES:
                continue  # a number, which becomes an argument of the kernel
            if source in self._moving:
                return f"it reads {source.name}, host memory whose address changes"
            if not all(tensor.is_pinned() for tensor in elsewhere):
                return f"it reads {source.name}, host memory that is not pinned"
        return None

    def _reason_of_memory(self, node: Node) -> str | None:
        """Whether recorded work would write to, or miss a write to, what it has only a copy of."""
        for source in node.all_input_nodes:
            if source not in self._moving:
                continue
            if not isinstance(value_of(source), torch.Tensor):
                return f"it reads {source.name}, which is not a tensor and may change"
            if self._aliases.is_written(source):
                return f"it reads {source.name}, which is written to and whose address changes"
        return None


def _compute_capability(target: CaptureTarget) -> tuple[int, int]:
    if target.compute_capability is not None:
        return target.compute_capability
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _inner_obstacles(body: GraphModule, target: CaptureTarget) -> Iterator[Obstacle]:
    """Obstacles within a region, whose own inputs the region around it answers for."""
    num_inputs = len(body.graph.find_nodes(op="placeholder"))
    return iter(find_obstacles(body, target, num_static_inputs=num_inputs, in_region=True))


def _has_mask(node: Node) -> bool:
    indices = node.args[1] if len(node.args) > 1 else node.kwargs.get("indices", ())
    return isinstance(indices, Iterable) and any(
        tensor.dtype in (torch.bool, torch.uint8)
        for index in indices
        if isinstance(index, Node)
        for tensor in _tensors(value_of(index))
    )


def _group_name(collective: Node) -> str | None:
    assert isinstance(collective.target, OpOverload)  # as is_collective has seen
    for position, declared in enumerate(collective.target._schema.arguments):
        if declared.name == "group_name":
            given = collective.args[position] if position < len(collective.args) else None
            name = given or collective.kwargs.get("group_name")
            return name if isinstance(name, str) else None
    return None


def _operator_name(node: Node) -> str:
    if not isinstance(node.target, OpOverload):
        return ""
    return node.target._schema.name.split("::")[1]


def _copy_keeps_strides(tensor: torch.Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _leaves(node: Node) -> Iterator[object]:
    for argument in (*node.args, *node.kwargs.values()):
        yield from argument if isinstance(argument, (tuple, list)) else (argument,)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for leaf in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(leaf, torch.Tensor):
            yield leaf
