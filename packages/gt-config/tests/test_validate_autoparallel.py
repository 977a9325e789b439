"""Rules of automatic placement, one by one, with the exact text."""

import dataclasses

from asked import EP_TOPOLOGY, found, mesh, only, overlap

from gt_config import AutoParallelConfig, CompileConfig, Violation


def test_autoparallel_backend_needs_autoparallel():
    assert only(CompileConfig(inductor_compilation="autoparallel_backend")) == Violation(
        flag="--compile.inductor_compilation",
        value="autoparallel_backend",
        allowed="'autoparallel_backend' only with --compile.autoparallel",
        fix="add --compile.autoparallel, or choose another --compile.inductor_compilation",
    )


def test_autoparallel_backend_needs_a_trace():
    config = CompileConfig(
        inductor_compilation="autoparallel_backend", autoparallel=True, mode="aot_joint"
    )
    assert only(config) == Violation(
        flag="--compile.inductor_compilation",
        value="autoparallel_backend",
        allowed="'autoparallel_backend' only with --compile.mode aot_fx_trace: it orders one graph "
        "of forward and backward, and --compile.mode aot_joint has none",
        fix="use --compile.mode aot_fx_trace, or choose another --compile.inductor_compilation",
    )


AUTOPARALLEL = CompileConfig(autoparallel=True)


def test_placed_stages_are_captured():
    topology = mesh(world=4, pp=2, dp_shard=2)
    assert found(AUTOPARALLEL, topology) == ()
    eager = dataclasses.replace(AUTOPARALLEL, mode="none")
    assert only(eager, topology) == Violation(
        flag="--compile.mode",
        value="none",
        allowed="'aot_fx_trace' with --compile.autoparallel and "
        "--parallelism.pipeline_parallel_degree 2: eager stages would gather parameters and reduce "
        "gradients for every microbatch, and are planned as those that do so once a step",
        fix="use --compile.mode aot_fx_trace",
    )
    assert found(eager, mesh(world=2, dp_shard=2)) == ()


def test_the_backend_of_autoparallel_needs_a_step_that_is_one_graph():
    config = dataclasses.replace(AUTOPARALLEL, inductor_compilation="autoparallel_backend")
    assert only(config, mesh(world=4, pp=2, dp_shard=2)) == Violation(
        flag="--compile.inductor_compilation",
        value="autoparallel_backend",
        allowed="another one with --parallelism.pipeline_parallel_degree 2: it orders and compiles "
        "a step as a whole, and a stage is one graph for each action of the schedule",
        fix="leave the flag out, or use --parallelism.pipeline_parallel_degree 1",
    )


def test_autoparallel_plans_experts_over_ranks_of_tensor_parallelism_first():
    assert found(AUTOPARALLEL, mesh(world=4, dp_shard=2, tp=2)) == ()
    for tp, ep in ((2, 2), (2, 4), (4, 2)):
        assert found(AUTOPARALLEL, mesh(world=2 * tp, dp_shard=2, tp=tp, ep=ep)) == ()
    assert found(AUTOPARALLEL, EP_TOPOLOGY) == ()


def test_expert_parallelism_needs_an_axis():
    config = CompileConfig(
        autoparallel=True, autoparallel_solver=AutoParallelConfig(experts="expert_parallel")
    )
    assert only(config, mesh(world=4, dp_shard=4)) == Violation(
        flag="--compile.autoparallel_solver.experts",
        value="expert_parallel",
        allowed="'expert_parallel' only with --parallelism.expert_parallel_degree 2 or more",
        fix="give the experts an axis, or choose 'any', which may distribute them over another",
    )
    assert found(config, EP_TOPOLOGY) == ()


def test_autoparallel_needs_no_joint_graph():
    assert only(CompileConfig(autoparallel=True, mode="aot_joint")) == Violation(
        flag="--compile.mode",
        value="aot_joint",
        allowed="'aot_fx_trace' or 'none' with --compile.autoparallel: the planned forward and "
        "backward are one graph already",
        fix="use --compile.mode aot_fx_trace",
    )
    assert found(CompileConfig(autoparallel=True, mode="none")) == ()


def test_chunks_of_a_placed_model_are_made_on_its_graph():
    on_graph = dataclasses.replace(overlap(), autoparallel=True)
    assert found(on_graph, EP_TOPOLOGY) == ()
    eager = dataclasses.replace(overlap(strategy="eager"), autoparallel=True)
    assert only(eager, EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.strategy",
        value="eager",
        allowed="'graph' with --compile.autoparallel: the other cuts the calls of modules, and a "
        "placed model calls none, but runs a planned program",
        fix="use --compile.ep_overlap.strategy graph",
    )


def test_chunks_of_a_placed_model_are_of_samples_with_tensor_parallelism():
    config = overlap(chunk_dim="seq", module_fqn="layers.*.moe")
    topology = dataclasses.replace(EP_TOPOLOGY, world=2 * EP_TOPOLOGY.world, tp=2)
    assert only(dataclasses.replace(config, autoparallel=True), topology) == Violation(
        flag="--compile.ep_overlap.chunk_dim",
        value="seq",
        allowed="'batch' with --compile.autoparallel and --parallelism.tensor_parallel_degree 2: a "
        "plan exchanges parts of the sequence for parts of features between these ranks inside the "
        "modules, and what arrives is no chunk of it",
        fix="use --compile.ep_overlap.chunk_dim batch, or --parallelism.tensor_parallel_degree 1",
    )


def test_ep_overlap_needs_experts_that_may_exchange_tokens():
    def placed(experts):
        solver = AutoParallelConfig(experts=experts)
        return dataclasses.replace(overlap(), autoparallel=True, autoparallel_solver=solver)

    assert only(placed("own_tokens"), EP_TOPOLOGY) == Violation(
        flag="--compile.autoparallel_solver.experts",
        value="own_tokens",
        allowed="'any' or 'expert_parallel' with --compile.ep_overlap.enabled: ranks that keep "
        "their tokens exchange none, and there is nothing to overlap",
        fix="choose expert_parallel, or turn EP overlap off",
    )
    assert found(placed("expert_parallel"), EP_TOPOLOGY) == ()


def test_the_autoparallel_backend_has_an_order_of_its_own():
    config = dataclasses.replace(
        overlap(), autoparallel=True, inductor_compilation="autoparallel_backend"
    )
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.enabled",
        value=True,
        allowed="False with --compile.inductor_compilation autoparallel_backend, which orders "
        "collectives and computation of the whole step for itself",
        fix="turn EP overlap off, or leave --compile.inductor_compilation out",
    )


def test_accepts_the_autoparallel_backend_with_both():
    config = CompileConfig(inductor_compilation="autoparallel_backend", autoparallel=True)
    assert found(config) == ()


def test_a_saved_plan_needs_autoparallel():
    config = CompileConfig(autoparallel_solver=AutoParallelConfig(plan="plan.json"))
    assert only(config) == Violation(
        flag="--compile.autoparallel_solver.plan",
        value="plan.json",
        allowed="None without --compile.autoparallel: nobody would read it",
        fix="add --compile.autoparallel, or drop the option",
    )
    assert found(dataclasses.replace(config, autoparallel=True)) == ()


def test_options_of_the_search_do_nothing_for_a_saved_plan():
    solver = AutoParallelConfig(plan="plan.json", time_limit_seconds=5.0, memory_budget_gib=1.0)
    assert only(CompileConfig(autoparallel=True, autoparallel_solver=solver)) == Violation(
        flag="--compile.autoparallel_solver.time_limit_seconds",
        value=5.0,
        allowed="its default 120.0, since the plan is that of --compile.autoparallel_solver.plan "
        "and it would do nothing",
        fix="drop the option, or use no --compile.autoparallel_solver.plan",
    )
    solver = dataclasses.replace(solver, time_limit_seconds=120.0, relative_gap=0.0)
    assert only(CompileConfig(autoparallel=True, autoparallel_solver=solver)).flag == (
        "--compile.autoparallel_solver.relative_gap"
    )


def test_plans_cut_sequences_themselves():
    assert only(AUTOPARALLEL, mesh(world=2, cp=2)) == Violation(
        flag="--parallelism.context_parallel_degree",
        value=2,
        allowed="1 with --compile.autoparallel: a plan takes whole sequences, and cuts them itself "
        "where that is cheapest",
        fix="leave the flag out, and use --parallelism.tensor_parallel_degree for an axis along "
        "which a plan may cut sequences; or drop --compile.autoparallel",
    )
