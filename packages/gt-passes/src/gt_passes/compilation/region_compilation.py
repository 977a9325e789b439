"""Regions that were chosen, compiled: each is outlined, and equal ones share one program.

A model repeats its layers. Two outlines are equal when the same operators are called with the same
constants on values that correspond, and their inputs agree in all but contents.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping

from torch.fx import GraphModule, Node

from gt_passes._torch_internals import value_of
from gt_passes.analysis.graph_constants import freeze_argument, freeze_call
from gt_passes.analysis.outlined_region import Outline, OutlinedRegion, RegionOutliner
from gt_passes.analysis.tensor_signature import TensorSignature, signature
from gt_passes.compilation.inductor_compiler import SubgraphCompiler
from gt_passes.compilation.inductor_regions import RegionChoice, is_flex_attention
from gt_passes.contract import PassReport

_ALIGNMENT_BYTES = 16
"""The width of a GPU's widest load."""


def compile_regions(
    graph_module: GraphModule, choice: RegionChoice, compiler: SubgraphCompiler
) -> PassReport:
    """Put a call of a compiled program in place of each region, in place.

    Equal regions, such as those of equal layers, are compiled once.

    Raises:
        InductorOptionError: a region's options name one that this PyTorch's Inductor does not have.
    """
    outliner = RegionOutliner(graph_module)
    compiled: dict[Hashable, OutlinedRegion] = {}
    for plan in choice.regions:
        outline = outliner.outline(plan.nodes, anchor=plan.anchor)
        identity = _region_identity(graph_module, outline, plan.options)
        if identity not in compiled:
            body = outliner.body(outline)
            compiled[identity] = OutlinedRegion(body, compiler.compile(body, plan.options))
        outliner.replace(outline, compiled[identity], stem="inductor_region")
    outliner.finish()
    counts = {
        "regions": len(choice.regions),
        "compiled": len(compiled),
        "nodes": sum(len(plan.nodes) for plan in choice.regions),
    }
    return PassReport(
        changed=bool(choice.regions),
        counts=counts,
        refusals=choice.refusals,
    )


def _region_identity(
    graph_module: GraphModule, outline: Outline, options: Mapping[str, object]
) -> Hashable:
    """What decides the compiled form of a region: equal for regions that one program serves.

    Linear in the number of nodes. A constant that cannot be compared is equal to itself only.
    """
    numbers: dict[Node, Hashable] = {node: number for number, node in enumerate(outline.inputs)}
    sign = _sign_elements if _reads_elements_only(outline) else signature
    inputs = tuple(sign(value_of(node)) for node in outline.inputs)
    calls = []
    for node in outline.nodes:
        calls.append(freeze_call(graph_module, node, numbers))
        numbers[node] = len(numbers)
    outputs = tuple(numbers[node] for node in outline.outputs)
    return (inputs, tuple(calls), outputs, freeze_argument(graph_module, dict(options), numbers))


def _reads_elements_only(outline: Outline) -> bool:
    """Whether a region asks its inputs for their elements, and not where they lie in memory."""
    calls = (node for node in outline.nodes if node.target is not operator.getitem)
    return all(map(is_flex_attention, calls))


def _sign_elements(value: object) -> Hashable:
    """A signature without the place in the storage: chunks are parts of one tensor.

    But for its alignment, by which Inductor chooses loads.
    """
    signed = signature(value)
    if not isinstance(signed, TensorSignature) or not isinstance(signed.storage_offset, int):
        return signed
    return signed._replace(
        storage_offset=signed.storage_offset * signed.dtype.itemsize % _ALIGNMENT_BYTES
    )
