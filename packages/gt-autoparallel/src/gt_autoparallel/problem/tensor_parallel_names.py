"""Which parameters Megatron cuts by columns and which by rows, by the names that models give them.

A linear layer's weight is (outputs, inputs). Cut by columns, each rank computes some of the
outputs; cut by rows, each rank takes some of the inputs, and the results are summed. A block is a
pair of both with something pointwise, or attention, in between, so that only its end communicates
(Shoeybi et al., Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelNames:
    """Patterns of fully qualified names; what matches none is replicated."""

    columns: tuple[str, ...] = (
        "*.attention.qkv_linear.wqkv.weight",
        *(f"*.attention.qkv_linear.{name}.weight" for name in ("wq", "wk", "wv")),
        *(f"*.attention.{name}.weight" for name in ("wq", "wk", "wv", "wq_b", "wkv_b")),
        *(
            f"*.{mlp}.{name}.weight"
            for mlp in ("feed_forward", "shared_experts")
            for name in ("w1", "w3")
        ),
        *(f"*.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")),
        *(f"*.mlp.{name}.weight" for name in ("gate_proj", "up_proj")),
        *("output.weight", "lm_head.weight", "*.lm_head.weight"),
    )
    """Weights (outputs, inputs) of which each rank has some outputs: torchtitan's and Hugging
    Face's names."""

    rows: tuple[str, ...] = (
        "*.attention.wo.weight",
        "*.feed_forward.w2.weight",
        "*.shared_experts.w2.weight",
        "*.self_attn.o_proj.weight",
        "*.mlp.down_proj.weight",
    )
    """Weights of which each rank has some inputs."""

    vocabulary: tuple[str, ...] = (
        "tok_embeddings.weight",
        "embed_tokens.weight",
        "*.embed_tokens.weight",
    )
    """Embedding tables of which each rank has some rows."""

    def dim_of(self, parameter: str) -> int | None:
        """The dim that a rank has a piece of; None if it has all."""
        first = (*self.columns, *self.vocabulary)
        if any(fnmatchcase(parameter, pattern) for pattern in first):
            return 0
        return 1 if any(fnmatchcase(parameter, pattern) for pattern in self.rows) else None
