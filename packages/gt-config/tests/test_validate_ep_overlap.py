"""Rules of expert-parallel overlap, one by one, with the exact text."""

import dataclasses

import pytest
from asked import EP_TOPOLOGY, NUM_CHUNKS, found, only, overlap

from gt_config import Topology, Violation


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"module_fqn": "layers.*.moe"},
        {"module_fqn": "layers.*.moe", "chunk_dim": "seq", "num_chunks": 4},
        {"strategy": "eager"},
        {"disable_early_grad_accumulation": True},
    ],
)
def test_accepts_ep_overlap_choices_that_fit(settings):
    assert found(overlap(**settings), EP_TOPOLOGY) == ()


def test_ep_overlap_needs_expert_parallelism():
    assert only(overlap()) == Violation(
        flag="--compile.ep_overlap.enabled",
        value=True,
        allowed="True only with --parallelism.expert_parallel_degree above 1; it is 1",
        fix="raise --parallelism.expert_parallel_degree, or turn EP overlap off",
    )


@pytest.mark.parametrize("mode", ["none", "aot_joint"])
def test_ep_overlap_needs_a_trace(mode):
    config = dataclasses.replace(overlap(), mode=mode)
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.enabled",
        value=True,
        allowed="True only with --compile.mode aot_fx_trace: it orders one graph of forward and "
        f"backward, and --compile.mode {mode} has none",
        fix="use --compile.mode aot_fx_trace, or turn EP overlap off",
    )


def test_sequence_chunking_needs_moe_roots():
    assert only(overlap(chunk_dim="seq"), EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.chunk_dim",
        value="seq",
        allowed="'seq' only with --compile.ep_overlap.module_fqn layers.*.moe, not layers.*: "
        "attention needs the whole K/V context",
        fix="use --compile.ep_overlap.module_fqn 'layers.*.moe', or --compile.ep_overlap.chunk_dim batch",
    )


def test_the_eager_strategy_takes_two_chunks_only():
    assert only(overlap(strategy="eager", num_chunks=4), EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.num_chunks",
        value=4,
        allowed="2, with --compile.ep_overlap.strategy eager",
        fix="use 2 chunks, or --compile.ep_overlap.strategy graph",
    )


def test_the_eager_strategy_never_accumulates_early():
    config = overlap(strategy="eager", disable_early_grad_accumulation=True)
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.disable_early_grad_accumulation",
        value=True,
        allowed="its default False, since the eager strategy never accumulates early",
        fix="drop the option, or use --compile.ep_overlap.strategy graph",
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_refuses_a_batch_that_does_not_split_into_equal_chunks(batch_size):
    topology = dataclasses.replace(EP_TOPOLOGY, batch_size=batch_size)
    assert only(overlap(), topology) == Violation(
        flag="--training.local_batch_size",
        value=batch_size,
        allowed="a multiple of 2, for 2 equal chunks",
        fix=f"use {batch_size + 1}" + ("" if batch_size == 1 else f", or {NUM_CHUNKS} 3"),
    )


def test_refuses_more_chunks_than_samples_and_offers_the_nearest_number_that_fits():
    topology = dataclasses.replace(EP_TOPOLOGY, batch_size=6)
    assert only(overlap(num_chunks=8), topology).fix == f"use 8, or {NUM_CHUNKS} 6"
    assert only(overlap(num_chunks=4), topology).fix == f"use 8, or {NUM_CHUNKS} 3"


def test_offers_no_other_number_of_chunks_where_there_is_none():
    topology = dataclasses.replace(EP_TOPOLOGY, batch_size=3)
    assert only(overlap(strategy="eager"), topology).fix == "use 4"


def test_refuses_a_sequence_that_does_not_split_into_equal_chunks_on_each_shard():
    topology = Topology(world=4, tp=4, ep=4, batch_size=1, seq_len=12)
    config = overlap(chunk_dim="seq", module_fqn="layers.*.moe", strategy="eager")
    assert only(config, topology) == Violation(
        flag="--training.seq_len",
        value=12,
        allowed="a multiple of 8, for 2 equal chunks on each of 4 sequence shards",
        fix="use 16",
    )
    whole = dataclasses.replace(topology, sequence_parallel=False)
    assert found(config, whole) == ()


def test_batch_chunks_in_stages_are_cut_from_microbatches():
    topology = Topology(world=4, pp=2, dp_shard=2, ep=2, batch_size=7, microbatch_size=3, seq_len=8)
    assert only(overlap(chunk_dim="batch"), topology) == Violation(
        flag="--parallelism.pipeline_parallel_microbatch_size",
        value=3,
        allowed="a multiple of 2, for 2 equal chunks",
        fix="use 4, or --compile.ep_overlap.num_chunks 3",
    )
    assert found(overlap(chunk_dim="batch", num_chunks=3), topology) == ()
    by_sequence = overlap(chunk_dim="seq", module_fqn="layers.*.moe")
    assert found(by_sequence, topology) == ()


def test_chunks_of_the_sequence_on_the_graph_are_refused_with_tensor_parallelism():
    topology = dataclasses.replace(EP_TOPOLOGY, world=2 * EP_TOPOLOGY.world, tp=2)
    by_sequence = overlap(chunk_dim="seq", module_fqn="layers.*.moe")
    assert only(by_sequence, topology) == Violation(
        flag="--compile.ep_overlap.strategy",
        value="graph",
        allowed="'eager' for chunks of the sequence with --parallelism.tensor_parallel_degree 2: "
        "ranks cut the sequence between them inside the modules, and a chunk of what they gather "
        "is no chunk of what each has",
        fix="use eager, --compile.ep_overlap.chunk_dim batch, or "
        "--parallelism.tensor_parallel_degree 1",
    )
    assert found(dataclasses.replace(by_sequence, ep_overlap=overlap().ep_overlap), topology) == ()
    eager = overlap(chunk_dim="seq", module_fqn="layers.*.moe", strategy="eager")
    assert found(eager, topology) == ()


def test_ep_overlap_is_refused_with_full_inductor_compilation():
    config = dataclasses.replace(overlap(), inductor_compilation="full")
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.inductor_compilation",
        value="full",
        allowed="'none' or 'regional' with EP overlap: in one program Inductor fuses operators of "
        "several chunks, and then waits for an exchange before it computes what was to hide it",
        fix="use regional, or turn EP overlap off",
    )
    assert found(dataclasses.replace(config, inductor_compilation="regional"), EP_TOPOLOGY) == ()


def test_ep_overlap_goes_with_recordings_and_asynchronous_tensor_parallelism():
    topology = dataclasses.replace(EP_TOPOLOGY, world=2 * EP_TOPOLOGY.world, tp=2)
    config = dataclasses.replace(overlap(), cuda_graphs=True, async_tensor_parallel=True)
    assert found(config, topology) == ()


def test_graph_chunks_of_whole_layers_cannot_hold_rings():
    shared = dataclasses.replace(EP_TOPOLOGY, cp=2, world=2 * EP_TOPOLOGY.world)
    ring = dataclasses.replace(overlap(), context_parallel="ring")
    assert only(ring, shared) == Violation(
        flag="--compile.context_parallel",
        value="ring",
        allowed="'gather' with EP overlap of whole layers by the strategy graph: a ring's message "
        "has all samples in one row, of which no chunk can be told",
        fix="use gather, --compile.ep_overlap.strategy eager, or --compile.ep_overlap.module_fqn "
        "'layers.*.moe'",
    )
    for changes in ({"strategy": "eager"}, {"module_fqn": "layers.*.moe"}):
        accepted = dataclasses.replace(overlap(**changes), context_parallel="ring")
        assert found(accepted, shared) == ()
    assert found(overlap(), shared) == ()
