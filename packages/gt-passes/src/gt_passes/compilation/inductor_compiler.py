"""Compile a graph with Inductor, with every option given explicitly and none left behind.

The way in is ``torch._inductor.standalone_compile``. It runs AOTAutograd, which makes the graph
functional, lowers its operators to those that Inductor knows, and gives mutations of inputs and
outputs that alias inputs back to the caller; ``compile_fx_inner`` would want all of that done. See
docs/decisions/0006-compilation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from gt_passes._torch_compilation_internals import (
    compile_with_inductor,
    known_inductor_options,
    product_of,
)
from gt_passes._torch_internals import value_of
from gt_passes.analysis.outlined_region import Runner
from gt_passes.compilation.compiler_products import note_product
from gt_passes.compilation.saved_values import keep_saved_values
from gt_passes.errors import InductorOptionError

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
