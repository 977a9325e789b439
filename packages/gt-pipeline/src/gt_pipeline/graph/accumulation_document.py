"""A step of several microbatches as a document, and back.

What was cut is stored, and the microbatches' graphs as passes have left them. The cut is made again
for what it says of them, as of a stage (``stage_document``): which inputs are sums, no document
tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any, Unpack

from gt_passes import Verifier
from gt_passes.verifier.verifier import GraphInterface
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph.accumulation_cut import AccumulationGraphs, MicrobatchGraph, cut_tidied
from gt_pipeline.graph.changed_graphs import refuse_problems
from gt_trace.artifacts.decoder import Decoder
from gt_trace.artifacts.encoded_document import (
    DecodingOptions,
    EncodedDocument,
    decode_document,
    encode_document,
)
from gt_trace.artifacts.encoder import Encoder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.operators import NAMESPACES
from gt_trace.artifacts.step_document import decoded_step, step_content
from gt_trace.errors import ArtifactError


def encode_accumulation(
    graphs: AccumulationGraphs, axes: MeshAxes, *, namespaces: Collection[str] = NAMESPACES
) -> EncodedDocument:
    """A step of several microbatches as a document that is the same on all ranks that are alike.

    Args:
        graphs: as cut, or after passes that generate no code.
        axes: names of this rank's process groups.
        namespaces: of operators that graphs may call.

    Raises:
        ArtifactError: they hold something that no document can hold; it is named.
    """
    return encode_document(graphs, axes, accumulation_content, namespaces=namespaces)


def decode_accumulation(
    document: Any, axes: MeshAxes, *, verify: bool = True, **options: Unpack[DecodingOptions]
) -> AccumulationGraphs:
    """The step of a document, as this rank would have captured and cut it.

    Args:
        document: as ``encode_accumulation`` made it, through JSON.
        axes: names of this rank's process groups, and where it stands.
        verify: whether to verify every stored graph.
        **options: ``DecodingOptions``.

    Raises:
        ArtifactError: the document is damaged, names what there is not here, or describes graphs
            that are broken or cannot be cut; every problem of a graph is listed.
    """
    decoded = partial(decoded_accumulation, verify=verify)
    return decode_document(document, axes, decoded, **options)


def accumulation_content(encoder: Encoder, graphs: AccumulationGraphs) -> dict[str, Any]:
    """A step of several microbatches as part of a document of ``encoder``."""
    return {
        "step": step_content(encoder, graphs.traced),
        "num_results": graphs.num_results,
        "num_microbatches": graphs.num_microbatches,
        "graphs": {each.role: encoder.graph(each.graph_module) for each in graphs.graphs},
    }


def decoded_accumulation(
    decoder: Decoder, content: Any, *, verify: bool = True
) -> AccumulationGraphs:
    """The step that ``accumulation_content`` encoded, verified and cut.

    Raises:
        ArtifactError: as for ``decode_accumulation``.
    """
    traced = decoded_step(decoder, content["step"])
    verifier = Verifier()
    if verify:
        whole = verifier.verify(traced.graph_module)
        refuse_problems("the step of one microbatch", whole.problems)
    num_microbatches, num_results = content["num_microbatches"], content["num_results"]
    if not (type(num_microbatches) is int and num_microbatches >= 2):
        raise ArtifactError(f"a step of {num_microbatches!r} microbatches is not cut")
    if not (type(num_results) is int and 0 <= num_results <= len(traced.output_layouts)):
        raise ArtifactError(f"a step has {num_results!r} results of each microbatch")
    try:
        cut = cut_tidied(traced, num_results=num_results, num_microbatches=num_microbatches)
    except StageCutError as error:
        raise ArtifactError(f"the document describes a step that cannot be: {error}") from error
    stored = content["graphs"]
    if stored.keys() != (roles := {each.role for each in cut.graphs}):
        raise ArtifactError(f"graphs of {', '.join(stored)} are stored, and not of {sorted(roles)}")

    def loaded(before: MicrobatchGraph) -> MicrobatchGraph:
        graph_module = decoder.graph(stored[before.role])
        if verify:
            interface = GraphInterface.of(before.graph_module)
            report = verifier.verify(graph_module, interface=interface)
            refuse_problems(f"the {before.role} microbatch", report.problems)
        return dataclasses.replace(before, graph_module=graph_module)

    return dataclasses.replace(
        cut,
        first=loaded(cut.first),
        further=None if cut.further is None else loaded(cut.further),
        last=loaded(cut.last),
    )
