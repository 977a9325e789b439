"""Rules of automatic placement: what it needs, and what it does without."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import must_be_default, rule, violation
from gt_config._subject import Subject, flag_of
from gt_config.errors import Violation


@rule("config.inductor_compilation", "config.autoparallel", "config.mode")
def _autoparallel_backend_needs_autoparallel_and_a_trace(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if config.inductor_compilation != "autoparallel_backend":
        return
    if not config.autoparallel:
        yield violation(
            subject,
            "config.inductor_compilation",
            allowed="'autoparallel_backend' only with --compile.autoparallel",
            fix="add --compile.autoparallel, or choose another --compile.inductor_compilation",
        )
    if config.mode != "aot_fx_trace":
        yield violation(
            subject,
            "config.inductor_compilation",
            allowed=f"'autoparallel_backend' only with --compile.mode aot_fx_trace, "
            f"not {config.mode}",
            fix="use --compile.mode aot_fx_trace, or choose another --compile.inductor_compilation",
        )


@rule("config.autoparallel", "config.mode", "config.inductor_compilation", "topology.pp")
def _placed_stages_are_captured_actions(subject: Subject) -> Iterator[Violation]:
    config, degree = subject.config, subject.topology.pp
    if not config.autoparallel or degree == 1:
        return
    if config.mode == "none":
        yield violation(
            subject,
            "config.mode",
            allowed=f"'aot_fx_trace' with --compile.autoparallel and {flag_of('topology.pp')} "
            f"{degree}: eager stages would gather parameters and reduce gradients for every "
            "microbatch, and are planned as those that do so once a step",
            fix="use --compile.mode aot_fx_trace",
        )
    if config.inductor_compilation == "autoparallel_backend":
        yield violation(
            subject,
            "config.inductor_compilation",
            allowed=f"another one with {flag_of('topology.pp')} {degree}: it orders and compiles a "
            "step as a whole, and a stage is one graph for each action of the schedule",
            fix=f"leave the flag out, or use {flag_of('topology.pp')} 1",
        )


@rule("config.autoparallel", "config.autoparallel_solver.experts", "topology.ep")
def _expert_parallelism_needs_an_axis(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if not config.autoparallel or config.autoparallel_solver.experts != "expert_parallel":
        return
    if subject.topology.ep == 1:
        yield violation(
            subject,
            "config.autoparallel_solver.experts",
            allowed=f"'expert_parallel' only with {flag_of('topology.ep')} 2 or more",
            fix="give the experts an axis, or choose 'any', which may distribute them over another",
        )


@rule("config.autoparallel", "config.autoparallel_solver.experts", "config.ep_overlap.enabled")
def _what_is_not_exchanged_is_not_overlapped(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if not config.autoparallel or not config.ep_overlap.enabled:
        return
    if config.autoparallel_solver.experts == "own_tokens":
        yield violation(
            subject,
            "config.autoparallel_solver.experts",
            allowed="'any' or 'expert_parallel' with --compile.ep_overlap.enabled: ranks that keep "
            "their tokens exchange none, and there is nothing to overlap",
            fix="choose expert_parallel, or turn EP overlap off",
        )


_PLAN = "config.autoparallel_solver.plan"
_OF_THE_SEARCH = (
    "config.autoparallel_solver.time_limit_seconds",
    "config.autoparallel_solver.relative_gap",
    "config.autoparallel_solver.simulate_rivals",
)


@rule("config.autoparallel", _PLAN, *_OF_THE_SEARCH)
def _a_saved_plan_is_applied_and_not_searched(subject: Subject) -> Iterator[Violation]:
    plan = subject.config.autoparallel_solver.plan
    if plan is None:
        return
    if not subject.config.autoparallel:
        yield violation(
            subject,
            _PLAN,
            allowed="None without --compile.autoparallel: nobody would read it",
            fix="add --compile.autoparallel, or drop the option",
        )
        return
    for path in _OF_THE_SEARCH:
        yield from must_be_default(
            subject,
            path,
            because=f"the plan is that of {flag_of(_PLAN)}",
            switch=f"no {flag_of(_PLAN)}",
        )


@rule(
    "config.autoparallel",
    "config.mode",
    "config.inductor_compilation",
    "config.ep_overlap.enabled",
    "config.ep_overlap.strategy",
    "topology.cp",
)
def _autoparallel_does_without(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if not config.autoparallel:
        return
    if config.mode == "aot_joint" and config.inductor_compilation != "autoparallel_backend":
        yield violation(
            subject,
            "config.mode",
            allowed="'aot_fx_trace' or 'none' with --compile.autoparallel: the planned forward and "
            "backward are one graph already",
            fix="use --compile.mode aot_fx_trace",
        )
    if config.ep_overlap.enabled and config.ep_overlap.strategy == "eager":
        yield violation(
            subject,
            "config.ep_overlap.strategy",
            allowed="'graph' with --compile.autoparallel: the other cuts the calls of modules, and "
            "a placed model calls none, but runs a planned program",
            fix="use --compile.ep_overlap.strategy graph",
        )
    if config.ep_overlap.enabled and config.inductor_compilation == "autoparallel_backend":
        yield violation(
            subject,
            "config.ep_overlap.enabled",
            allowed="False with --compile.inductor_compilation autoparallel_backend, which orders "
            "collectives and computation of the whole step for itself",
            fix="turn EP overlap off, or leave --compile.inductor_compilation out",
        )
    if subject.topology.cp > 1:
        yield violation(
            subject,
            "topology.cp",
            allowed="1 with --compile.autoparallel: a plan takes whole sequences, and cuts them "
            "itself where that is cheapest",
            fix=f"leave the flag out, and use {flag_of('topology.tp')} for an axis along which a "
            "plan may cut sequences; or drop --compile.autoparallel",
        )
