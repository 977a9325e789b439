"""Attention over a sequence that ranks share, as traceable collectives."""

from gt_trace.context_parallel.gather_sequence import SequenceAxis, gather_sequence

__all__ = ["SequenceAxis", "gather_sequence"]
