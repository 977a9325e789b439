"""The two producers of chunks against each other. Workers import this module by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eager_chunk_training import chunked_passes
from training_cases import Case, close, differing_passes

from gt_config import EpOverlapConfig
from gt_passes.ep_overlap import ChunkRegions, exposed_exchanges

__all__ = ["ProducerComparison", "compare_producers"]

ProducerComparison = tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[str, ...]]
"""What differs in any bit; how the regions of the two graphs differ; exchanges of either graph that
no compute of another chunk hides."""


def compare_producers(
    case: Case, folder: str, overlaps: Mapping[str, EpOverlapConfig]
) -> dict[str, ProducerComparison]:
    """Passes with chunks made before the trace, and with chunks made on its graph in eager's order.

    Args:
        case: without EP overlap.
        folder: for dump folders.
        overlaps: with the strategy eager, by name.
    """
    found = {}
    for number, (name, eager) in enumerate(overlaps.items()):
        graph = replace(eager, strategy="graph", disable_early_grad_accumulation=True)
        runs = [
            chunked_passes(
                case,
                f"{folder}/{number}_{overlap.strategy}",
                {"ep_overlap": overlap},
                close_it=False,
            )
            for overlap in (eager, graph)
        ]
        (eager_passes, eager_trainer), (graph_passes, graph_trainer) = runs
        differences = [
            difference
            for index, (a, b) in enumerate(zip(eager_passes, graph_passes, strict=True))
            for difference in differing_passes(a, b, f"pass {index}")
        ]
        graphs = [t.captures[0].traced.graph_module for t in (eager_trainer, graph_trainer)]
        structures = [
            {(r.root, r.direction, r.num_chunks) for r in ChunkRegions.of(each).regions}
            for each in graphs
        ]
        exposed = [str(exchange) for each in graphs for exchange in exposed_exchanges(each)]
        found[name] = (
            tuple(differences),
            tuple(sorted(structures[0] ^ structures[1])),
            tuple(exposed),
        )
        close(eager_trainer, graph_trainer)
    return found
