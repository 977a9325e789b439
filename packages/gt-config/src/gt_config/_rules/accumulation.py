"""Rules of gradient accumulation: when microbatches can share something."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import must_be_default, rule, violation
from gt_config._subject import Subject, flag_of
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


@rule("config.mode", "config.accumulation", "config.autoparallel")
def _plans_say_when_ranks_communicate(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if not config.autoparallel or config.accumulation != "reduce_once":
        return
    yield violation(
        subject,
        "config.accumulation",
        allowed="'every_microbatch' with --compile.autoparallel: a plan is the cheapest if every "
        "microbatch gathers and reduces as it says",
        fix="drop one of the two",
    )


@rule("config.mode", "config.accumulation", "topology.pp", "config.fsdp_second_group")
def _microbatches_share_gathering_and_reduction(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    is_shared = config.accumulation == "reduce_once" and config.mode == "aot_fx_trace"
    if is_shared and subject.topology.pp == 1 and config.fsdp_second_group:
        yield violation(
            subject,
            "config.fsdp_second_group",
            allowed="False with --compile.accumulation reduce_once: no microbatch both gathers "
            "parameters and reduces gradients",
            fix="leave the flag out, or use --compile.accumulation every_microbatch",
        )


@rule("config.mode", "config.accumulation", "config.cuda_graphs", "topology.ep")
def _whole_steps_are_recorded(subject: Subject) -> Iterator[Violation]:
    config, degree = subject.config, subject.topology.ep
    is_one_recording = config.accumulation == "reduce_once" and config.mode == "aot_fx_trace"
    if is_one_recording and subject.topology.pp == 1 and config.cuda_graphs and degree > 1:
        yield violation(
            subject,
            "config.cuda_graphs",
            allowed=f"False with --compile.accumulation reduce_once and {flag_of('topology.ep')} "
            f"{degree}: such a step is one CUDA graph or none, and how many tokens are exchanged "
            "is known on the device alone",
            fix="leave the flag out, or use --compile.accumulation every_microbatch",
        )
