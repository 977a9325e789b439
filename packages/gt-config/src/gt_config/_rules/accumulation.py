"""Rules of gradient accumulation: when microbatches can share something."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import must_be_default, rule
from gt_config._subject import Subject
from gt_config.errors import Violation

_MESH = ("dp_replicate", "dp_shard", "cp", "tp")


@rule(
    "config.mode",
    "config.accumulation",
    "topology.pp",
    "topology.gradient_accumulation_steps",
    "topology.sequence_parallel",
    *(f"topology.{axis}" for axis in _MESH),
)
def _reduce_once_needs_microbatches_and_ranks(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    if subject.config.mode != "aot_fx_trace" or mesh.pp > 1:
        return
    if mesh.gradient_accumulation_steps == 1:
        yield from must_be_default(
            subject,
            "config.accumulation",
            because="a step has one microbatch",
            switch="a larger --training.global_batch_size",
        )
        return
    shares_state = mesh.dp_replicate * mesh.dp_shard * mesh.cp > 1
    if not shares_state and not (mesh.tp > 1 and mesh.sequence_parallel):
        yield from must_be_default(
            subject,
            "config.accumulation",
            because="no parameter is gathered and no gradient reduced",
            switch="several data-parallel ranks",
        )
