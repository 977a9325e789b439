"""Rules of expert-parallel overlap."""

from __future__ import annotations

from collections.abc import Iterator

from gt_config._rules.rule import round_up, rule, violation
from gt_config._subject import Subject, flag_of, leaf_paths, value_at
from gt_config.compile_config import EpOverlapConfig
from gt_config.errors import Violation

_EP_OVERLAP = tuple(leaf_paths(EpOverlapConfig, "config.ep_overlap"))


@rule("config.ep_overlap.enabled", "config.mode", "topology.ep")
def _ep_overlap_needs_a_trace_and_ep(subject: Subject) -> Iterator[Violation]:
    if not subject.config.ep_overlap.enabled:
        return
    if subject.config.mode != "aot_fx_trace":
        yield violation(
            subject,
            "config.ep_overlap.enabled",
            allowed=f"True only with --compile.mode aot_fx_trace, not {subject.config.mode}",
            fix="use --compile.mode aot_fx_trace, or turn EP overlap off",
        )
    if subject.topology.ep <= 1:
        yield violation(
            subject,
            "config.ep_overlap.enabled",
            allowed=f"True only with {flag_of('topology.ep')} above 1; it is {subject.topology.ep}",
            fix=f"raise {flag_of('topology.ep')}, or turn EP overlap off",
        )


@rule(*_EP_OVERLAP)
def _ep_overlap_choices_fit_together(subject: Subject) -> Iterator[Violation]:
    overlap = subject.config.ep_overlap
    if not overlap.enabled:
        return
    if overlap.chunk_dim == "seq" and overlap.module_fqn != "layers.*.moe":
        yield violation(
            subject,
            "config.ep_overlap.chunk_dim",
            allowed=f"'seq' only with --compile.ep_overlap.module_fqn layers.*.moe, "
            f"not {overlap.module_fqn}: attention needs the whole K/V context",
            fix="use --compile.ep_overlap.module_fqn 'layers.*.moe', or "
            "--compile.ep_overlap.chunk_dim batch",
        )
    if overlap.strategy == "eager" and overlap.num_chunks != 2:
        yield violation(
            subject,
            "config.ep_overlap.num_chunks",
            allowed="2, with --compile.ep_overlap.strategy eager",
            fix="use 2 chunks, or --compile.ep_overlap.strategy graph",
        )
    if overlap.strategy == "eager" and overlap.disable_early_grad_accumulation:
        yield violation(
            subject,
            "config.ep_overlap.disable_early_grad_accumulation",
            allowed="its default False, since the eager strategy never accumulates early",
            fix="drop the option, or use --compile.ep_overlap.strategy graph",
        )


@rule(
    "config.ep_overlap.enabled",
    "config.ep_overlap.chunk_dim",
    "config.ep_overlap.num_chunks",
    "config.ep_overlap.strategy",
    "topology.batch_size",
    "topology.microbatch_size",
    "topology.seq_len",
    "topology.pp",
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
    samples = "topology.batch_size" if mesh.pp == 1 else "topology.microbatch_size"
    path = samples if overlap.chunk_dim == "batch" else "topology.seq_len"
    extent: int = value_at(subject, path)
    divisor = overlap.num_chunks * shards
    if extent % divisor == 0:
        return
    over = f" on each of {shards} sequence shards" if shards > 1 else ""
    yield violation(
        subject,
        path,
        allowed=f"a multiple of {divisor}, for {overlap.num_chunks} equal chunks{over}",
        fix=f"use {round_up(extent, divisor)}{_other_number_of_chunks(overlap, extent, shards)}",
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


@rule(
    "config.autoparallel",
    "config.ep_overlap.enabled",
    "config.ep_overlap.strategy",
    "config.ep_overlap.chunk_dim",
    "topology.tp",
)
def _ep_overlap_on_the_graph_by_samples_with_tp(subject: Subject) -> Iterator[Violation]:
    overlap = subject.config.ep_overlap
    on_graph = overlap.enabled and overlap.strategy == "graph" and overlap.chunk_dim == "seq"
    if not on_graph or subject.topology.tp == 1:
        return
    if subject.config.autoparallel:
        yield violation(
            subject,
            "config.ep_overlap.chunk_dim",
            allowed=f"'batch' with --compile.autoparallel and {flag_of('topology.tp')} "
            f"{subject.topology.tp}: a plan exchanges parts of the sequence for parts of features "
            "between these ranks inside the modules, and what arrives is no chunk of it",
            fix=f"use {flag_of('config.ep_overlap.chunk_dim')} batch, or "
            f"{flag_of('topology.tp')} 1",
        )
    else:
        yield violation(
            subject,
            "config.ep_overlap.strategy",
            allowed=f"'eager' for chunks of the sequence with {flag_of('topology.tp')} "
            f"{subject.topology.tp}: ranks cut the sequence between them inside the modules, "
            "and a chunk of what they gather is no chunk of what each has",
            fix=f"use eager, {flag_of('config.ep_overlap.chunk_dim')} batch, or "
            f"{flag_of('topology.tp')} 1",
        )


@rule(
    "config.context_parallel",
    "config.ep_overlap.enabled",
    "config.ep_overlap.strategy",
    "config.ep_overlap.module_fqn",
    "topology.cp",
)
def _ep_overlap_on_the_graph_around_rings(subject: Subject) -> Iterator[Violation]:
    overlap = subject.config.ep_overlap
    on_graph = overlap.enabled and overlap.strategy == "graph"
    is_ring = subject.config.context_parallel == "ring" and subject.topology.cp > 1
    if on_graph and overlap.module_fqn == "layers.*" and is_ring:
        yield violation(
            subject,
            "config.context_parallel",
            allowed="'gather' with EP overlap of whole layers by the strategy graph: a ring's "
            "message has all samples in one row, of which no chunk can be told",
            fix="use gather, --compile.ep_overlap.strategy eager, or "
            "--compile.ep_overlap.module_fqn 'layers.*.moe'",
        )


@rule("config.ep_overlap.enabled", "config.inductor_compilation")
def _ep_overlap_with_a_graph_that_keeps_its_order(subject: Subject) -> Iterator[Violation]:
    if subject.config.ep_overlap.enabled and subject.config.inductor_compilation == "full":
        yield violation(
            subject,
            "config.inductor_compilation",
            allowed="'none' or 'regional' with EP overlap: in one program Inductor fuses operators "
            "of several chunks, and then waits for an exchange before it computes what was to "
            "hide it",
            fix="use regional, or turn EP overlap off",
        )
