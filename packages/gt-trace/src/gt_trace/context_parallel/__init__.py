"""Attention over a sequence that ranks share, as traceable collectives."""

from gt_trace.context_parallel.gather_sequence import gather_sequence
from gt_trace.context_parallel.ring_attention import BlockAttention, ring_attention
from gt_trace.context_parallel.sequence_axis import SequenceAxis

__all__ = ["BlockAttention", "SequenceAxis", "gather_sequence", "ring_attention"]
