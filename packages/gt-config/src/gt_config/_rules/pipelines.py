"""Rules of pipelines: what they cannot have, and why."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import rule, violation
from gt_config._subject import Subject, flag_of, value_at
from gt_config.errors import Violation

_WITHOUT_PIPELINE: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("config.mode", ("none", "aot_fx_trace"), "stages are captured with their backward, or eager"),
    (
        "config.fsdp_into_dense_regions",
        (False,),
        "gathering and reducing are actions of their own, and the schedule says when they run",
    ),
)
"""Options that a pipeline cannot have: what is allowed, and why."""


@rule("topology.pp", *(path for path, _, _ in _WITHOUT_PIPELINE))
def _pipelines_run_by_actions(subject: Subject) -> Iterator[Violation]:
    degree = value_at(subject, "topology.pp")
    if degree == 1:
        return
    for path, allowed, why in _WITHOUT_PIPELINE:
        if value_at(subject, path) in allowed:
            continue
        choices = " or ".join(repr(each) for each in allowed)
        yield violation(
            subject,
            path,
            allowed=f"{choices} with {flag_of('topology.pp')} {degree}: {why}",
            fix=f"use {allowed[-1]}, or {flag_of('topology.pp')} 1",
        )


@rule(
    "topology.pp",
    "topology.ep",
    "config.cuda_graphs",
    "config.memory_policy",
    "config.pipeline_gathered_gib",
)
def _recorded_actions_keep_addresses(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    is_recorded = value_at(subject, "topology.pp") > 1 and config.cuda_graphs
    if is_recorded and config.memory_policy == "offload":
        yield violation(
            subject,
            "config.cuda_graphs",
            allowed="False with --compile.memory_policy offload in a pipeline: each microbatch has "
            "host memory of its own, and a CUDA graph copies to one address",
            fix="leave the flag out, or use another --compile.memory_policy",
        )
    exchanges = value_at(subject, "topology.ep") > 1
    if is_recorded and exchanges and config.pipeline_gathered_gib is not None:
        yield violation(
            subject,
            "config.pipeline_gathered_gib",
            allowed="None with --compile.cuda_graphs and expert parallelism: a step that exchanges "
            "tokens is recorded action by action, and those recordings read gathered parameters at "
            "addresses that stay, so that nothing frees them",
            fix="leave out one of the two",
        )
