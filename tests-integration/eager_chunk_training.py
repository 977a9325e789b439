"""Training with modules in chunks against training without. Workers import this by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torchtitan.models.common.moe import GroupedExperts
from training_cases import Case, Pass, close, same, take_unseen, trainer_of

from gt_config import EpOverlapConfig
from gt_passes.ep_overlap import ChunkRegions

__all__ = [
    "ChunkedTraining",
    "chunked_passes",
    "compare_chunked",
    "compute_experts_in_float32",
    "relative_difference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTraining:
    """What a rank found of one run in chunks."""

    largest_difference: float
    """From the run without chunks, over the loss and the gradients of passes with the same
    weights: the norm of the difference of a tensor, divided by the norm of the tensor."""

    differing_buffers: tuple[str, ...]
    """Buffers that are not bitwise those of the run without chunks."""

    largest_of: str
    """Where that is."""

    is_bitwise: bool
    """Whether nothing differs at all, so that perhaps nothing was chunked."""

    regions: tuple[tuple[str, str, int], ...]
    """Root, direction and number of chunks of every region, after all passes."""

    exchanges_of_a_chunk: tuple[int, ...]
    """For each region, the collectives that its first chunk launches."""

    verified: bool


def compare_chunked(
    case: Case, folder: str, runs: Mapping[str, tuple[EpOverlapConfig, Mapping[str, Any]]]
) -> dict[str, ChunkedTraining]:
    """Make passes without chunks, and in chunks once for each run, from the same weights.

    Without optimizer steps, which would let the weights drift apart; on batches with documents
    that differ, uneven loads and idle experts.

    Args:
        case: without EP overlap.
        folder: for dump folders.
        runs: EP overlap and other options of ``--compile``, by name.
    """
    whole = chunked_passes(case, f"{folder}/whole", {})[0]
    found = {}
    for number, (name, (overlap, options)) in enumerate(runs.items()):
        passes, trainer = chunked_passes(
            case, f"{folder}/{number}", {**options, "ep_overlap": overlap}, close_it=False
        )
        found[name] = _compare(whole, passes, trainer)
        close(trainer)
    return found


def chunked_passes(
    case: Case, folder: str, options: Mapping[str, Any], *, close_it: bool = True
) -> tuple[list[Pass], Any]:
    """Passes on three batches, and the trainer that made them; experts compute in float32."""
    trainer = trainer_of(case, "aot_fx_trace", folder, options=options)
    compute_experts_in_float32(trainer.model_parts[0])
    take_unseen(trainer)
    if close_it:
        close(trainer)
    return trainer.passes, trainer


def compute_experts_in_float32(model: nn.Module) -> None:
    """torchtitan's experts compute in bfloat16 whatever the model does.

    Then the gradients of their weights are rounded to bfloat16 once for each chunk, and no longer
    differ by the order of summation alone.
    """

    def forward(
        self: GroupedExperts, x_RD: torch.Tensor, num_tokens_E: torch.Tensor
    ) -> torch.Tensor:
        w1, w2, w3 = (
            (w.to_local() if isinstance(w, DTensor) else w).transpose(-2, -1)
            for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends_E = torch.cumsum(num_tokens_E, dim=0, dtype=torch.int32)
        h_RF = F.silu(torch._grouped_mm(x_RD, w1, offs=ends_E))
        h_RF = h_RF * torch._grouped_mm(x_RD, w3, offs=ends_E)
        return torch._grouped_mm(h_RF, w2, offs=ends_E)

    for module in model.modules():
        if isinstance(module, GroupedExperts):
            object.__setattr__(module, "forward", MethodType(forward, module))


def _compare(whole: list[Pass], chunked: list[Pass], trainer: Any) -> ChunkedTraining:
    largest, largest_of = 0.0, ""
    buffers: list[str] = []
    bitwise = True
    for number, (a, b) in enumerate(zip(whole, chunked, strict=True)):
        assert a.gradients.keys() == b.gradients.keys()
        pairs = {"loss": (a.loss, b.loss)}
        pairs |= {name: (a.gradients[name], b.gradients[name]) for name in a.gradients}
        bitwise = bitwise and all(same(*pair) for pair in pairs.values())
        for name, pair in pairs.items():
            difference = relative_difference(*pair)
            if difference > largest:
                largest, largest_of = difference, f"pass {number} {name}"
        buffers += [f"pass {number} {n}" for n in a.buffers if not same(a.buffers[n], b.buffers[n])]
    (report,) = trainer.captures
    regions = ChunkRegions.of(report.traced.graph_module).regions
    return ChunkedTraining(
        largest_difference=largest,
        largest_of=largest_of,
        differing_buffers=tuple(buffers),
        is_bitwise=bitwise,
        regions=tuple((r.root, r.direction, r.num_chunks) for r in regions),
        exchanges_of_a_chunk=tuple(len(region.launches(0)) for region in regions),
        verified=report.passes.verified,
    )


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The norm of the difference divided by the norm of what is expected; where that is zero, the
    norm of the difference."""
    norm = expected.double().norm().item()
    difference = (found.double() - expected.double()).norm().item()
    return difference / norm if norm > 0 else difference
