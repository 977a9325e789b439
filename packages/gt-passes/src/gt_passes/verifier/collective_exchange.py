"""Ranks tell each other which collectives they are about to run, before they run any.

Without it, ranks whose graphs differ hang in the first step until a timeout that names nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist
from torch.fx import GraphModule

from gt_passes.errors import CollectiveMismatchError
from gt_passes.verifier.collective_order import CollectiveSequence, compare_collective_sequences

_MOST_SHOWN_RANKS = 16


def exchange_collective_digest(
    graph_module: GraphModule, group: dist.ProcessGroup | None = None
) -> str:
    """Make sure that all ranks of a group run the same sequence of collectives.

    To be called by every rank of the group, after the passes and before the first step. It costs
    one small all-gather; the sequences themselves are sent only when digests differ, and then only
    two of them.

    Args:
        graph_module: what this rank will run.
        group: the ranks that run the same graph; None for all of them. Stages of a pipeline run
            different graphs: give the group of the ranks of one stage.

    Returns:
        The digest that all ranks agree on. Without a process group, in a group of one, and in a
        world of fake ranks, which has nobody to ask, that of this rank.

    Raises:
        CollectiveMismatchError: ranks differ; the same on every rank.
    """
    sequence = CollectiveSequence.of(graph_module)
    digest = sequence.digest
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return digest
    if dist.get_backend(group) == "fake":
        return digest
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return digest
    raise _mismatch(sequence, digests, group)


def _mismatch(
    sequence: CollectiveSequence, digests: Sequence[str], group: dist.ProcessGroup | None
) -> CollectiveMismatchError:
    """The error, the same on every rank: from what all know, and what two of them send to all."""
    ranks = dist.get_process_group_ranks(group)
    # The digest of most ranks; of equally many, that of the lowest rank.
    usual = Counter(digests).most_common(1)[0][0]
    differing = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != usual]
    one, other = ranks[digests.index(usual)], differing[0]
    sequences = {}
    for sender in (one, other):
        sent: list[CollectiveSequence] = [sequence]
        dist.broadcast_object_list(sent, src=sender, group=group)
        sequences[sender] = sent[0]
    (difference,) = compare_collective_sequences(sequences)
    shown = ", ".join(map(str, differing[:_MOST_SHOWN_RANKS]))
    if len(differing) > _MOST_SHOWN_RANKS:
        shown += f" and {len(differing) - _MOST_SHOWN_RANKS} more"
    return CollectiveMismatchError(
        f"{len(differing)} of {len(ranks)} ranks would run other collectives than the rest, and "
        f"all would hang: {'rank' if len(differing) == 1 else 'ranks'} {shown}\n{difference}\n"
        "Ranks must capture the same program: look for conditions on the rank, on its data or on "
        "its environment in the model, and for passes that iterate over sets.",
        ranks=tuple(differing),
    )
