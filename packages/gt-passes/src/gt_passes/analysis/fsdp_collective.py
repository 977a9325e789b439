"""Which nodes are FSDP's, whose collectives passes put in buckets, move and wait for later."""

from __future__ import annotations

from torch.fx import Node

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_trace import read_annotation


def fsdp_collective(node: Node) -> FsdpCollectiveAnnotation | None:
    """Return what a node is part of, if FSDP's: a gather of parameters or a reduction of gradients.

    Sums over the tensor-parallel ranks that have parts of a gradient (``sum_parts``) are none: the
    reduction behind them reads them at once, so that nothing is gained by a later wait, and as a
    bucket they would hold back the reduction of all that is with them.
    """
    annotation = read_annotation(node, FsdpCollectiveAnnotation)
    return None if annotation is None or annotation.kind == "sum_parts" else annotation
