"""Options that need another, or would silently do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import must_be_default, rule
from gt_config._subject import Subject
from gt_config.errors import Violation

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


@rule("config.mode", *_GRAPH_ONLY)
def _eager_mode_ignores_graph_options(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode != "none":
        return
    for path in _GRAPH_ONLY:
        yield from must_be_default(
            subject, path, because="--compile.mode none captures no graph", switch="another mode"
        )


@rule("config.mode", "config.capture_layers")
def _only_one_graph_of_a_step_is_stamped(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode != "aot_joint":
        return
    yield from must_be_default(
        subject,
        "config.capture_layers",
        because="--compile.mode aot_joint exports every layer",
        switch="--compile.mode aot_fx_trace",
    )


@rule("config.inductor_compilation", "config.regional_modules")
def _regional_modules_need_regional_compilation(subject: Subject) -> Iterator[Violation]:
    inductor = subject.config.inductor_compilation
    if inductor == "regional":
        return
    yield from must_be_default(
        subject,
        "config.regional_modules",
        because=f"inductor_compilation is {inductor}",
        switch="--compile.inductor_compilation regional",
    )


@rule("config.fsdp_bucketing", "config.fsdp_bucket_cap_mib")
def _bucket_cap_needs_bucketing(subject: Subject) -> Iterator[Violation]:
    if subject.config.fsdp_bucketing != "off":
        return
    yield from must_be_default(
        subject,
        "config.fsdp_bucket_cap_mib",
        because="FSDP bucketing is off",
        switch="--compile.fsdp_bucketing transformer_block",
    )


@rule("config.memory_policy", "config.full_recompute_saved_ops")
def _saved_ops_need_full_recompute(subject: Subject) -> Iterator[Violation]:
    policy = subject.config.memory_policy
    if policy == "full_recompute":
        return
    yield from must_be_default(
        subject,
        "config.full_recompute_saved_ops",
        because=f"memory_policy is {policy}",
        switch="--compile.memory_policy full_recompute",
    )


@rule("config.mode", "config.joint_partitioner")
def _joint_partitioner_needs_a_joint_graph(subject: Subject) -> Iterator[Violation]:
    mode = subject.config.mode
    if mode == "aot_joint":
        return
    yield from must_be_default(
        subject,
        "config.joint_partitioner",
        because=f"--compile.mode is {mode}",
        switch="--compile.mode aot_joint",
    )


@rule("config.mode", "config.memory_policy")
def _memory_policy_needs_a_whole_step(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode != "aot_joint":
        return
    yield from must_be_default(
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


@rule("config.memory_policy", *_OFFLOAD)
def _offload_settings_need_the_offload_policy(subject: Subject) -> Iterator[Violation]:
    policy = subject.config.memory_policy
    if policy == "offload":
        return
    for path in _OFFLOAD:
        yield from must_be_default(
            subject,
            path,
            because=f"memory_policy is {policy}",
            switch="--compile.memory_policy offload",
        )


_FSDP_SCHEDULE = (
    "config.fsdp_second_group",
    "config.fsdp_into_dense_regions",
)


@rule("config.mode", *_FSDP_SCHEDULE, "topology.dp_shard", "topology.cp", "topology.ep")
def _fsdp_schedule_needs_something_to_schedule(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    if subject.config.mode == "none":
        return
    if mesh.dp_shard * mesh.cp == 1:
        for path in _FSDP_SCHEDULE:
            yield from must_be_default(
                subject,
                path,
                because="no parameter is sharded over data-parallel ranks",
                switch="a dp_shard degree above 1",
            )
    elif mesh.ep == 1:
        yield from must_be_default(
            subject,
            "config.fsdp_into_dense_regions",
            because="no tokens are exchanged between experts",
            switch="an expert-parallel degree above 1",
        )


@rule("config.mode", "config.async_tensor_parallel", "topology.tp")
def _async_tensor_parallel_needs_tensor_parallelism(subject: Subject) -> Iterator[Violation]:
    if subject.config.mode == "none" or subject.topology.tp > 1:
        return
    yield from must_be_default(
        subject,
        "config.async_tensor_parallel",
        because="there is no tensor parallelism",
        switch="a tensor-parallel degree above 1",
    )
