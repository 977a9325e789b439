"""Compile a graph with Inductor, with every option given explicitly and none left behind.

The way in is ``torch._inductor.standalone_compile``. It runs AOTAutograd, which makes the graph
functional, lowers its operators to those that Inductor knows, and gives mutations of inputs and
outputs that alias inputs back to the caller; ``compile_fx_inner`` would want all of that done. See
docs/decisions/0006-compilation.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from gt_passes._torch_compilation_internals import (
    buffer_operator,
    compile_with_inductor,
    known_inductor_options,
    product_of,
)
from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.outlined_region import Runner
from gt_passes.analysis.tensor_signature import is_symbolic, signature
from gt_passes.compilation.compiler_products import note_product
from gt_passes.errors import InductorOptionError
from gt_trace.node_metadata import phase_of

_KEEP_ORDER: Mapping[str, object] = MappingProxyType(
    {
        # The passes before have decided when each collective is launched and awaited, and what is
        # alive when; all ranks must keep launching in the same order.
        "reorder_for_locality": False,
        "reorder_for_peak_memory": False,
        "reorder_for_compute_comm_overlap": False,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
        "_micro_pipeline_tp": False,
        "aten_distributed_optimizations.enable_simple_overlap": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
        "aten_distributed_optimizations.collective_bucketing": False,
    }
)

_EAGER_ROUNDING: Mapping[str, object] = MappingProxyType(
    {
        "emulate_precision_casts": True,  # round to bfloat16 wherever eager does
        "eager_numerics.division_rounding": True,
    }
)

_ALWAYS: Mapping[str, object] = MappingProxyType(
    {
        "fallback_random": True,  # the random numbers of eager, in its order
        "keep_output_stride": True,  # who reads the result was captured with its strides
        "triton.cudagraphs": False,  # a pass of their own records them
    }
)


class SubgraphCompiler(Protocol):
    """Makes a callable out of a graph."""

    def compile(self, body: GraphModule, options: Mapping[str, object]) -> Runner:
        """Compile a graph of plain tensors.

        Args:
            body: with fake values in ``node.meta["val"]`` and a tuple as output. Not changed.
            options: of Inductor, over the compiler's own.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InductorCompiler:
    """Compiles with Inductor, for the device of the graph: C++ on CPU, Triton on GPU."""

    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Names and values of ``torch._inductor.config``, as ``{"max_autotune": True}``."""

    eager_rounding: bool = True
    """Round where eager rounds: fused operators then keep the bits of each, and only reductions and
    matrix products differ. False keeps more precision between fused operators, and is faster."""

    keep_order: bool = True
    """Keep the order of the graph, above all that of its collectives."""

    def __post_init__(self) -> None:
        _check_options(self.options)

    def compile(self, body: GraphModule, options: Mapping[str, object]) -> Runner:
        """Compile ``body``; see ``SubgraphCompiler``.

        Raises:
            InductorOptionError: an option that this PyTorch's Inductor does not have.
        """
        _check_options(options)
        inputs = [value_of(node) for node in body.graph.find_nodes(op="placeholder")]
        program = keep_saved_values(body)
        compiled = compile_with_inductor(program, inputs, self.effective_options(options))
        product = product_of(compiled)
        if product is not None:
            note_product(product)
        outputs = [value_of(node) for node in body.graph.output_node().args[0]]  # type: ignore[union-attr, arg-type]  # a tuple of nodes, as Outliner makes it
        return _CheckedOnce(compiled, outputs)

    def effective_options(self, options: Mapping[str, object]) -> dict[str, object]:
        """All options that a compilation uses, those of this PyTorch's Inductor only."""
        ours = {
            **(_KEEP_ORDER if self.keep_order else {}),
            **(_EAGER_ROUNDING if self.eager_rounding else {}),
            **_ALWAYS,
        }
        known = known_inductor_options()
        return {
            # An older Inductor lacks some of what must be turned off: then there is nothing to.
            **{name: value for name, value in ours.items() if name in known},
            **self.options,
            **options,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeOnly:
    """Makes regions and compiles nothing: for a dry run, on a machine without the device."""

    def compile(self, body: GraphModule, options: Mapping[str, object]) -> Runner:
        """Return what runs the graph as it is."""
        return body


class _CheckedOnce:
    """A compiled graph whose first results are held against the recorded shapes and strides.

    Views further on were captured for these strides, and would address other elements.
    """

    def __init__(self, compiled: Callable[..., Sequence[Any]], expected: Sequence[object]) -> None:
        self._compiled = compiled
        self._expected: Sequence[object] | None = expected

    def __call__(self, *args: Any) -> Sequence[Any]:
        results = self._compiled(*args)
        if self._expected is not None:
            problems = [
                f"output {position}: {_layout(got)} instead of {_layout(wanted)}"
                for position, (wanted, got) in enumerate(zip(self._expected, results, strict=True))
                if _layout(wanted) != _layout(got)
            ]
            if problems:
                raise RuntimeError(
                    "Inductor returned what was not captured (a defect of Inductor, or of a fake "
                    "implementation):\n  " + "\n  ".join(problems)
                )
            self._expected = None
        return results


def _layout(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    # The stride of a dim of size 1 addresses nothing.
    strides = tuple(
        stride if size != 1 else None
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return f"{value.dtype} {tuple(value.shape)} with strides {strides}"


def _check_options(options: Mapping[str, object]) -> None:
    if not options:
        return  # importing Inductor, to ask for its options, takes seconds
    unknown = sorted(set(options) - known_inductor_options())
    if unknown:
        raise InductorOptionError(unknown)


# Let a compiled step keep for its backward what the memory policy decided to keep.
#
# Inductor computes an elementwise operator wherever its result is read, and keeps its operands
# instead. Forward and backward of a step are one graph, so it does the same with what the
# backward reads: of ``x + a + b``, kept as the input of a layer, it keeps ``a`` and ``b``
# besides the ``x`` that the layer before has kept. Where the operands take more memory than the
# result, the result is made a buffer of its own here.
_CASTS = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default})

_MOST_OPERANDS = 8
"""Inductor makes a buffer of what reads more."""


def keep_saved_values(body: GraphModule) -> GraphModule:
    """A graph in which results that the backward reads are buffers, where that takes less memory.

    *Before*::

        y = add(x, mm_1)                 # forward
        ...
        z = mul(gradient, y)             # backward: computes y again, and keeps mm_1 for it

    *After*::

        y = add(x, mm_1);  kept = inductor_force_stride_order(y, [64, 1])
        ...
        z = mul(gradient, kept)

    Args:
        body: with fake values and phases. Stays as it is.

    Returns:
        A copy; ``body`` itself where nothing is to be kept.
    """
    kept = list(_Choice(body.graph).kept())
    if not kept:
        return body
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(body.graph, copies))
    for node in kept:
        copied = copies[node]
        value = value_of(node)
        assert isinstance(value, torch.Tensor)  # as _Choice has asked
        with graph.inserting_after(copied):
            buffer = graph.call_function(buffer_operator(), (copied, list(value.stride())))
        buffer.meta = dict(copied.meta)
        for user in list(copied.users):
            if user is not buffer:
                user.replace_input_with(copied, buffer)
    return GraphModule(body, graph)


class _Choice:
    """What to keep. In execution order, so that a layer builds on what those before it keep."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._aliases = AliasClasses(graph)
        self._sources: dict[Node, frozenset[Node]] = {}
        """The buffers of which Inductor computes a value; itself for a buffer."""

        self._held: set[Node] = set()
        """Buffers that the backward reads in any case."""

    def kept(self) -> Iterator[Node]:
        saved = self._saved()
        for node in self._graph.nodes:
            sources = self._sources_of(node)
            if node not in saved:
                self._sources[node] = sources
                continue
            operands = sources - self._held
            if node not in sources and _num_bytes(node) < sum(map(_num_bytes, operands)):
                self._sources[node] = frozenset({node})
                yield node
            else:
                self._sources[node] = sources
            self._held |= self._sources[node]

    def _saved(self) -> set[Node]:
        """What the backward reads and did not make; of a view, what it views."""
        saved = set()
        for node in self._graph.nodes:
            if node.op == "call_function" and phase_of(node) == "backward":
                for argument in node.all_input_nodes:
                    while _is_view(argument):
                        argument = argument.all_input_nodes[0]
                    if phase_of(argument) != "backward":
                        saved.add(argument)
        return saved

    def _sources_of(self, node: Node) -> frozenset[Node]:
        if node.op in ("placeholder", "get_attr"):
            return frozenset()  # held by whoever calls the graph
        if not self._is_computed_where_read(node):
            return frozenset({node})
        sources = frozenset().union(*(self._sources[each] for each in node.all_input_nodes))
        return sources if len(sources) <= _MOST_OPERANDS else frozenset({node})

    def _is_computed_where_read(self, node: Node) -> bool:
        if _is_view(node):
            return True
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
            return False
        if self._aliases.is_written(node):
            return False
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or is_symbolic(signature(value)):
            return False
        if value.is_complex():
            return False  # Inductor calls the operator
        return target in _CASTS or torch.Tag.pointwise in target.tags


def _is_view(node: Node) -> bool:
    """Whether a node is a view of its first argument; an item of several results is one of them."""
    return is_only_a_view(node) and node.target is not operator.getitem


def _num_bytes(node: Node) -> int:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or is_symbolic(signature(value)):
        return 0
    return value.numel() * value.element_size()
