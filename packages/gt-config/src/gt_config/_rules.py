"""Rules between fields. Each is one function that says what it reads and yields what is broken.

A rule never runs on a value that is wrong by itself (``_field_values``), so it may rely on types,
literal values and bounds. The mesh rules are those of torchtitan 0.3.0 (``ParallelDims`` and the
sequence-length check in ``Trainer``), stated before any process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from gt_config._subject import Subject, default_at, flag_of, leaf_paths, value_at
from gt_config.compile_config import AutoParallelConfig, EpOverlapConfig
from gt_config.errors import SelectorSyntaxError, Violation
from gt_config.selectors import (
    MODULE_PATTERN_SYNTAX,
    SELECTOR_SYNTAX,
    SavedOpSelector,
    is_module_pattern,
)

Check = Callable[[Subject], Iterator[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check, and the paths whose values it relies on."""

    reads: tuple[str, ...]
    check: Check


RULES: list[Rule] = []
"""Every rule, in the order in which violations are reported."""


def _rule(*reads: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(reads=reads, check=check))
        return check

    return register


def _violation(subject: Subject, path: str, *, allowed: str, fix: str) -> Violation:
    return Violation(flag=flag_of(path), value=value_at(subject, path), allowed=allowed, fix=fix)


_SOLVER = tuple(leaf_paths(AutoParallelConfig, "config.autoparallel_solver"))
_EP_OVERLAP = tuple(leaf_paths(EpOverlapConfig, "config.ep_overlap"))
_EP_SETTINGS = tuple(path for path in _EP_OVERLAP if path != "config.ep_overlap.enabled")

_GRAPH_ONLY = (
    "config.inductor_compilation",
    "config.memory_policy",
    "config.passes",
    "config.disable_passes",
    "config.verify_passes",
    "config.debug_graph_passes",
    "config.fsdp_bucketing",
    "config.fsdp_bucket_cap_mib",
    "config.prefetch_layers",
    "config.fsdp_second_group",
    "config.fsdp_into_dense_regions",
    "config.async_tensor_parallel",
    "config.numerics_changing",
    "config.cuda_graphs",
    "config.capture_layers",
    "config.on_shape_change",
)
"""Options that act on a graph, and so on nothing in eager mode."""


# ---- the mesh and the batch --------------------------------------------------------------------

_WORLD_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


@_rule("topology.world", *(f"topology.{axis}" for axis in _WORLD_AXES))
def _degrees_multiply_to_world(subject: Subject) -> Iterator[Violation]:
    degrees = {axis: int(value_at(subject, f"topology.{axis}")) for axis in _WORLD_AXES}
    world, product = subject.topology.world, math.prod(degrees.values())
    if product == world:
        return
    rest = product // degrees["dp_shard"]
    fix = f"start {product} processes, or change a degree"
    if world % rest == 0:
        fix += f" (for example {flag_of('topology.dp_shard')} {world // rest})"
    terms = " * ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    yield _violation(subject, "topology.world", allowed=f"{terms} = {product}", fix=fix)


@_rule("topology.dp_shard", "topology.cp", "topology.tp", "topology.ep")
def _ep_divides_the_ranks_it_borrows(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    ranks = mesh.dp_shard * mesh.cp * mesh.tp
    if ranks % mesh.ep == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    yield _violation(
        subject,
        "topology.ep",
        allowed=f"a divisor of dp_shard {mesh.dp_shard} * cp {mesh.cp} * tp {mesh.tp} = {ranks}",
        fix=f"use one of {divisors}, or change the other degrees",
    )


@_rule("topology.seq_len", "topology.tp", "topology.cp", "topology.sequence_parallel")
def _sequence_divides_over_tp_and_cp(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    terms = []
    if mesh.sequence_parallel and mesh.tp > 1:
        terms.append(f"tp {mesh.tp}")
    if mesh.cp > 1:
        # The two halves of the sequence go to the ranks in opposite orders, to balance the mask.
        terms.append(f"2 * cp {mesh.cp}")
    divisor = (mesh.tp if mesh.sequence_parallel else 1) * (2 * mesh.cp if mesh.cp > 1 else 1)
    if mesh.seq_len % divisor == 0:
        return
    yield _violation(
        subject,
        "topology.seq_len",
        allowed=f"a multiple of {divisor} ({' * '.join(terms)})",
        fix=f"use {_round_up(mesh.seq_len, divisor)}, or smaller degrees",
    )


def _round_up(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor


# ---- options that need another, or would silently do nothing -----------------------------------


@_rule("config.inductor_compilation", "config.autoparallel", "config.mode")
def _autoparallel_backend_needs_autoparallel_and_a_trace(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if config.inductor_compilation != "autoparallel_backend":
        return
    if not config.autoparallel:
        yield _violation(
            subject,
            "config.inductor_compilation",
            allowed="'autoparallel_backend' only with --compile.autoparallel",
            fix="add --compile.autoparallel, or choose another inductor_compilation",
        )
    if config.mode != "aot_fx_trace":
        yield _violation(
            subject,
            "config.inductor_compilation",
            allowed=f"'autoparallel_backend' only with --compile.mode aot_fx_trace, "
            f"not {config.mode}",
            fix="use --compile.mode aot_fx_trace, or choose another inductor_compilation",
        )


@_rule("config.mode", *_GRAPH_ONLY)
def _eager_mode_ignores_graph_options(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode != "none":
        return
    for path in _GRAPH_ONLY:
        yield from _must_be_default(
            subject, path, because="--compile.mode none captures no graph", switch="another mode"
        )


@_rule("config.mode", "config.capture_layers")
def _only_one_graph_of_a_step_is_stamped(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode != "aot_joint":
        return
    yield from _must_be_default(
        subject,
        "config.capture_layers",
        because="--compile.mode aot_joint exports every layer",
        switch="--compile.mode aot_fx_trace",
    )


@_rule("config.autoparallel", *(f"topology.{axis}" for axis in ("dp_shard", "tp", "ep", "pp")))
def _autoparallel_plans_one_mesh_of_data_and_tensor_or_expert_axes(
    subject: Subject,
) -> Iterator[Violation]:
    config, mesh = subject.config, subject.topology
    if not config.autoparallel:
        return
    if mesh.pp > 1:
        yield _violation(
            subject,
            "topology.pp",
            allowed="1 with --compile.autoparallel, which plans whole models",
            fix=f"drop the option, or drop {flag_of('config.autoparallel')}",
        )
    if mesh.tp > 1 and mesh.ep > 1:
        yield _violation(
            subject,
            "topology.ep",
            allowed=f"1 with --compile.autoparallel and {flag_of('topology.tp')} {mesh.tp}: a plan "
            "is for one mesh, and these two axes overlap",
            fix="give the ranks to one of the two axes",
        )
    if mesh.ep > 1 and mesh.dp_shard % mesh.ep != 0:
        yield _violation(
            subject,
            "topology.ep",
            allowed=f"a divisor of {flag_of('topology.dp_shard')} {mesh.dp_shard} with "
            "--compile.autoparallel",
            fix="change one of the two degrees",
        )


@_rule(
    "config.autoparallel",
    "config.mode",
    "config.inductor_compilation",
    "config.ep_overlap.enabled",
)
def _autoparallel_does_without(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if not config.autoparallel:
        return
    if config.mode == "aot_joint" and config.inductor_compilation != "autoparallel_backend":
        yield _violation(
            subject,
            "config.mode",
            allowed="'aot_fx_trace' or 'none' with --compile.autoparallel: the planned forward and "
            "backward are one graph already",
            fix="use --compile.mode aot_fx_trace",
        )
    if config.ep_overlap.enabled:
        yield _violation(
            subject,
            "config.ep_overlap.enabled",
            allowed="False with --compile.autoparallel: chunks are cut along one dim of a batch, "
            "and a plan may cut it along another",
            fix="turn EP overlap off, or drop --compile.autoparallel",
        )


_BACKEND_DECIDES = (
    "config.memory_policy",
    "config.passes",
    "config.disable_passes",
    "config.fsdp_bucketing",
    "config.prefetch_layers",
    "config.fsdp_second_group",
    "config.fsdp_into_dense_regions",
    "config.async_tensor_parallel",
    "config.numerics_changing",
    "config.cuda_graphs",
)
"""Options of the native recipe: the other backend has a policy of its own."""


@_rule("config.inductor_compilation", *_BACKEND_DECIDES)
def _autoparallel_backend_has_its_own_policy(subject: Subject) -> Iterator[Violation]:
    if subject.config.inductor_compilation != "autoparallel_backend":
        return
    for path in _BACKEND_DECIDES:
        yield from _must_be_default(
            subject,
            path,
            because="--compile.inductor_compilation autoparallel_backend decides that itself",
            switch="another inductor_compilation",
        )


@_rule("config.autoparallel", *_SOLVER)
def _solver_limits_need_autoparallel(subject: Subject) -> Iterator[Violation]:
    if subject.config.autoparallel:
        return
    for path in _SOLVER:
        yield from _must_be_default(
            subject, path, because="autoparallel is off", switch="--compile.autoparallel"
        )


@_rule("config.inductor_compilation", "config.regional_modules")
def _regional_modules_need_regional_compilation(subject: Subject) -> Iterator[Violation]:
    inductor = subject.config.inductor_compilation
    if inductor == "regional":
        return
    yield from _must_be_default(
        subject,
        "config.regional_modules",
        because=f"inductor_compilation is {inductor}",
        switch="--compile.inductor_compilation regional",
    )


@_rule("config.fsdp_bucketing", "config.fsdp_bucket_cap_mib")
def _bucket_cap_needs_bucketing(subject: Subject) -> Iterator[Violation]:
    if subject.config.fsdp_bucketing != "off":
        return
    yield from _must_be_default(
        subject,
        "config.fsdp_bucket_cap_mib",
        because="FSDP bucketing is off",
        switch="--compile.fsdp_bucketing transformer_block",
    )


@_rule("config.memory_policy", "config.full_recompute_saved_ops")
def _saved_ops_need_full_recompute(subject: Subject) -> Iterator[Violation]:
    policy = subject.config.memory_policy
    if policy == "full_recompute":
        return
    yield from _must_be_default(
        subject,
        "config.full_recompute_saved_ops",
        because=f"memory_policy is {policy}",
        switch="--compile.memory_policy full_recompute",
    )


@_rule("config.mode", "config.joint_partitioner")
def _joint_partitioner_needs_a_joint_graph(subject: Subject) -> Iterator[Violation]:
    mode = subject.config.mode
    if mode == "aot_joint":
        return
    yield from _must_be_default(
        subject,
        "config.joint_partitioner",
        because=f"--compile.mode is {mode}",
        switch="--compile.mode aot_joint",
    )


@_rule("config.mode", "config.memory_policy")
def _memory_policy_needs_a_whole_step(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode != "aot_joint":
        return
    yield from _must_be_default(
        subject,
        "config.memory_policy",
        because="in --compile.mode aot_joint --compile.joint_partitioner says what is kept",
        switch="--compile.mode aot_fx_trace",
    )


_OFFLOAD = (
    "config.offload_host_gib",
    "config.offload_prefetch_layers",
    "config.offload_defer_layers",
)


@_rule("config.memory_policy", *_OFFLOAD)
def _offload_settings_need_the_offload_policy(subject: Subject) -> Iterator[Violation]:
    policy = subject.config.memory_policy
    if policy == "offload":
        return
    for path in _OFFLOAD:
        yield from _must_be_default(
            subject,
            path,
            because=f"memory_policy is {policy}",
            switch="--compile.memory_policy offload",
        )


_FSDP_SCHEDULE = (
    "config.fsdp_second_group",
    "config.fsdp_into_dense_regions",
)


@_rule("config.mode", *_FSDP_SCHEDULE, "topology.dp_shard", "topology.cp", "topology.ep")
def _fsdp_schedule_needs_something_to_schedule(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    if subject.config.mode == "none":
        return
    if mesh.dp_shard * mesh.cp == 1:
        for path in _FSDP_SCHEDULE:
            yield from _must_be_default(
                subject,
                path,
                because="no parameter is sharded over data-parallel ranks",
                switch="a dp_shard degree above 1",
            )
    elif mesh.ep == 1:
        yield from _must_be_default(
            subject,
            "config.fsdp_into_dense_regions",
            because="no tokens are exchanged between experts",
            switch="an expert-parallel degree above 1",
        )


@_rule("config.mode", "config.async_tensor_parallel", "topology.tp")
def _async_tensor_parallel_needs_tensor_parallelism(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode == "none" or subject.topology.tp > 1:
        return
    yield from _must_be_default(
        subject,
        "config.async_tensor_parallel",
        because="there is no tensor parallelism",
        switch="a tensor-parallel degree above 1",
    )


def _must_be_default(
    subject: Subject, path: str, *, because: str, switch: str
) -> Iterator[Violation]:
    default = default_at(subject, path)
    if value_at(subject, path) == default:
        return
    yield _violation(
        subject,
        path,
        allowed=f"its default {default!r}, since {because} and it would do nothing",
        fix=f"drop the option, or use {switch}",
    )


# ---- names -------------------------------------------------------------------------------------


@_rule("config.full_recompute_saved_ops")
def _saved_ops_are_selectors(subject: Subject) -> Iterator[Violation]:
    for text in subject.config.full_recompute_saved_ops:
        try:
            SavedOpSelector.parse(text)
        except SelectorSyntaxError:
            yield Violation(
                flag=flag_of("config.full_recompute_saved_ops"),
                value=text,
                allowed=SELECTOR_SYNTAX,
                fix="write it in that form",
            )


@_rule("config.regional_modules")
def _regional_modules_are_patterns(subject: Subject) -> Iterator[Violation]:
    for text in subject.config.regional_modules:
        if not is_module_pattern(text):
            yield Violation(
                flag=flag_of("config.regional_modules"),
                value=text,
                allowed=MODULE_PATTERN_SYNTAX,
                fix="write it in that form",
            )


@_rule("config.passes", "config.disable_passes")
def _passes_are_registered_and_named_once(subject: Subject) -> Iterator[Violation]:
    for path in ("config.passes", "config.disable_passes"):
        names: tuple[str, ...] = value_at(subject, path)
        for name in dict.fromkeys(names):
            if name not in subject.known_passes:
                yield _unknown_pass(subject, path, name)
            if names.count(name) > 1:
                yield Violation(
                    flag=flag_of(path),
                    value=name,
                    allowed="each pass once",
                    fix=f"name it once; it is named {names.count(name)} times",
                )
    for name in dict.fromkeys(subject.config.passes):
        if name in subject.config.disable_passes:
            yield Violation(
                flag=flag_of("config.disable_passes"),
                value=name,
                allowed="passes that --compile.passes does not name",
                fix="drop it from one of the two",
            )


def _unknown_pass(subject: Subject, path: str, name: str) -> Violation:
    known = sorted(subject.known_passes)
    near = get_close_matches(name, known)
    return Violation(
        flag=flag_of(path),
        value=name,
        allowed=f"the registered passes: {', '.join(known)}" if known else "no pass is registered",
        fix=f"did you mean {' or '.join(map(repr, near))}?" if near else "drop it",
    )


# ---- expert-parallel overlap -------------------------------------------------------------------


@_rule(*_EP_OVERLAP)
def _ep_overlap_settings_need_it_enabled(subject: Subject) -> Iterator[Violation]:
    if subject.config.ep_overlap.enabled:
        return
    for path in _EP_SETTINGS:
        yield from _must_be_default(
            subject, path, because="EP overlap is off", switch="--compile.ep_overlap.enabled"
        )


@_rule("config.ep_overlap.enabled", "config.mode", "topology.ep")
def _ep_overlap_needs_a_trace_and_ep(subject: Subject) -> Iterator[Violation]:
    if not subject.config.ep_overlap.enabled:
        return
    if subject.config.mode != "aot_fx_trace":
        yield _violation(
            subject,
            "config.ep_overlap.enabled",
            allowed=f"True only with --compile.mode aot_fx_trace, not {subject.config.mode}",
            fix="use --compile.mode aot_fx_trace, or turn EP overlap off",
        )
    if subject.topology.ep <= 1:
        yield _violation(
            subject,
            "config.ep_overlap.enabled",
            allowed=f"True only with {flag_of('topology.ep')} above 1; it is {subject.topology.ep}",
            fix=f"raise {flag_of('topology.ep')}, or turn EP overlap off",
        )


@_rule(*_EP_OVERLAP)
def _ep_overlap_choices_fit_together(subject: Subject) -> Iterator[Violation]:
    overlap = subject.config.ep_overlap
    if not overlap.enabled:
        return
    if overlap.chunk_dim == "seq" and overlap.module_fqn != "layers.*.moe":
        yield _violation(
            subject,
            "config.ep_overlap.chunk_dim",
            allowed=f"'seq' only with --compile.ep_overlap.module_fqn layers.*.moe, "
            f"not {overlap.module_fqn}: attention needs the whole K/V context",
            fix="use --compile.ep_overlap.module_fqn 'layers.*.moe', or chunk_dim batch",
        )
    if overlap.strategy == "eager" and overlap.num_chunks != 2:
        yield _violation(
            subject,
            "config.ep_overlap.num_chunks",
            allowed="2, with --compile.ep_overlap.strategy eager",
            fix="use 2 chunks, or --compile.ep_overlap.strategy graph",
        )
    if overlap.strategy == "eager" and overlap.disable_early_grad_accumulation:
        yield _violation(
            subject,
            "config.ep_overlap.disable_early_grad_accumulation",
            allowed="its default False, since the eager strategy never accumulates early",
            fix="drop the option, or use --compile.ep_overlap.strategy graph",
        )


@_rule(
    "config.ep_overlap.enabled",
    "config.ep_overlap.chunk_dim",
    "config.ep_overlap.num_chunks",
    "config.ep_overlap.strategy",
    "topology.batch_size",
    "topology.seq_len",
    "topology.cp",
    "topology.tp",
    "topology.sequence_parallel",
)
def _ep_overlap_chunks_are_equal(subject: Subject) -> Iterator[Violation]:
    overlap, mesh = subject.config.ep_overlap, subject.topology
    if not overlap.enabled:
        return
    # Chunks are cut from what one rank holds, and context and sequence parallelism shard that.
    shards = 1
    if overlap.chunk_dim == "seq":
        shards = mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)
    path = "topology.batch_size" if overlap.chunk_dim == "batch" else "topology.seq_len"
    extent: int = value_at(subject, path)
    divisor = overlap.num_chunks * shards
    if extent % divisor == 0:
        return
    over = f" on each of {shards} sequence shards" if shards > 1 else ""
    yield _violation(
        subject,
        path,
        allowed=f"a multiple of {divisor}, for {overlap.num_chunks} equal chunks{over}",
        fix=f"use {_round_up(extent, divisor)}{_other_number_of_chunks(overlap, extent, shards)}",
    )


def _other_number_of_chunks(overlap: EpOverlapConfig, extent: int, shards: int) -> str:
    """The nearest that cuts the extent into equal chunks, in words; nothing if none does."""
    if overlap.strategy == "eager" or extent % shards:
        return ""
    fitting = [n for n in range(2, extent // shards + 1) if extent % (n * shards) == 0]
    if not fitting:
        return ""
    nearest = min(fitting, key=lambda n: abs(n - overlap.num_chunks))
    return f", or {flag_of('config.ep_overlap.num_chunks')} {nearest}"


_WITHOUT_PIPELINE: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("config.mode", ("none", "aot_fx_trace"), "stages are captured with their backward, or eager"),
    (
        "config.memory_policy",
        ("save_all", "selective", "full_recompute"),
        "several microbatches are under way, and copies to the host are planned for one",
    ),
    ("config.capture_layers", ("full",), "stages are short, and captured in full"),
    ("config.on_shape_change", ("error",), "every microbatch has the shapes of the first"),
    ("config.fsdp_second_group", (False,), "gradients are reduced once, after all microbatches"),
    ("config.fsdp_into_dense_regions", (False,), "parameters are gathered between the actions"),
    ("config.cuda_graphs", (False,), "no GPU has run the two together yet"),
    ("topology.tp", (1,), "activations of tensor parallelism do not travel between stages yet"),
)
"""Options that a pipeline cannot have: what is allowed, and why."""


@_rule("topology.pp", *(path for path, _, _ in _WITHOUT_PIPELINE))
def _pipelines_run_by_actions(subject: Subject) -> Iterator[Violation]:
    degree = value_at(subject, "topology.pp")
    if degree == 1:
        return
    for path, allowed, why in _WITHOUT_PIPELINE:
        if value_at(subject, path) in allowed:
            continue
        choices = " or ".join(repr(each) for each in allowed)
        yield _violation(
            subject,
            path,
            allowed=f"{choices} with {flag_of('topology.pp')} {degree}: {why}",
            fix=f"use {allowed[-1]}, or {flag_of('topology.pp')} 1",
        )


@_rule("config.ep_overlap.enabled", "topology.pp", "topology.cp")
def _ep_overlap_of_whole_models_and_sequences(subject: Subject) -> Iterator[Violation]:
    if not subject.config.ep_overlap.enabled:
        return
    for path in ("topology.pp", "topology.cp"):
        degree = value_at(subject, path)
        if degree > 1:
            yield _violation(
                subject,
                "config.ep_overlap.enabled",
                allowed=f"True only with {flag_of(path)} 1; it is {degree}: "
                "the two have not been tested together",
                fix=f"use {flag_of(path)} 1, or turn EP overlap off",
            )


@_rule("config.ep_overlap.enabled", "config.ep_overlap.strategy", "topology.tp")
def _ep_overlap_on_the_graph_without_tp(subject: Subject) -> Iterator[Violation]:
    overlap = subject.config.ep_overlap
    if overlap.enabled and overlap.strategy == "graph" and subject.topology.tp > 1:
        yield _violation(
            subject,
            "config.ep_overlap.strategy",
            allowed=f"'eager' with {flag_of('topology.tp')} {subject.topology.tp}: "
            "the graph strategy has no rules for the collectives of tensor parallelism yet",
            fix=f"use eager, or {flag_of('topology.tp')} 1",
        )


@_rule("config.ep_overlap.enabled", "config.inductor_compilation")
def _ep_overlap_with_a_graph_that_keeps_its_order(subject: Subject) -> Iterator[Violation]:
    if subject.config.ep_overlap.enabled and subject.config.inductor_compilation == "full":
        yield _violation(
            subject,
            "config.inductor_compilation",
            allowed="'none' or 'regional' with EP overlap: in one compiled program "
            "nobody has tested that one chunk still hides another",
            fix="use regional, or turn EP overlap off",
        )


@_rule("config.ep_overlap.enabled", "config.cuda_graphs", "config.async_tensor_parallel")
def _ep_overlap_without_what_only_gpus_can_prove(subject: Subject) -> Iterator[Violation]:
    if not subject.config.ep_overlap.enabled:
        return
    for path in ("config.cuda_graphs", "config.async_tensor_parallel"):
        if value_at(subject, path):
            yield _violation(
                subject,
                path,
                allowed="False with EP overlap: no GPU has run the two together yet",
                fix="leave the flag out, or turn EP overlap off",
            )
