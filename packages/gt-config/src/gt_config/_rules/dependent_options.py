"""Options that would do nothing for want of something in the mesh, or where another decides.

Options that no pass of a run reads are not listed: whoever knows the passes finds them
(``gt_trainer.preflight.idle_options``).
"""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import must_be_default, rule, violation
from gt_config._subject import Subject
from gt_config.errors import Violation


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


_HOST_COPIES = (
    "copies to the host that a compiler has taken into a program go to new memory in every step, "
    "and a CUDA graph replays addresses"
)


@rule(
    "config.memory_policy",
    "config.cuda_graphs",
    "config.inductor_compilation",
    "config.regional_modules",
)
def _recorded_copies_to_the_host_are_not_compiled(subject: Subject) -> Iterator[Violation]:
    config = subject.config
    if config.memory_policy != "offload" or not config.cuda_graphs:
        return
    if config.inductor_compilation == "full":
        yield violation(
            subject,
            "config.inductor_compilation",
            allowed=f"'none' or 'regional' with offload and CUDA graphs: {_HOST_COPIES}",
            fix="use regional, another --compile.memory_policy, or leave out --compile.cuda_graphs",
        )
    elif config.inductor_compilation == "regional" and config.regional_modules:
        yield violation(
            subject,
            "config.regional_modules",
            allowed=f"no modules with offload and CUDA graphs: {_HOST_COPIES}",
            fix="drop the option, use another --compile.memory_policy, or leave out "
            "--compile.cuda_graphs",
        )


_FSDP_OPTIONS = (
    "config.fsdp_quantized_gathers",
    "config.fsdp_second_group",
    "config.fsdp_into_dense_regions",
)


@rule("config.mode", *_FSDP_OPTIONS, "topology.dp_shard", "topology.cp", "topology.ep")
def _fsdp_options_need_sharded_parameters(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    if subject.config.mode == "none":
        return
    if mesh.dp_shard * mesh.cp == 1:
        for path in _FSDP_OPTIONS:
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


@rule("config.context_parallel", "topology.cp")
def _context_parallel_strategy_needs_shared_sequences(subject: Subject) -> Iterator[Violation]:
    if subject.topology.cp == 1:
        yield from must_be_default(
            subject,
            "config.context_parallel",
            because="no ranks share a sequence",
            switch="a context-parallel degree above 1",
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
