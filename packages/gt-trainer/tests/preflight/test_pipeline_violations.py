"""What is refused of the pipeline options before a model exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torchtitan.config import ParallelismConfig

from gt_config import Violation
from gt_pipeline.schedules import schedule_of, schedule_to_csv
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.models.qwen3 import qwen3_debugmodel
from gt_trainer.parallelism_options import TrainerParallelismConfig
from gt_trainer.preflight.pipeline_violations import (
    balance_violations,
    pipeline_violations,
    stage_violations,
)


def options(**changes: object) -> ParallelismConfig:
    return ParallelismConfig(**{"pipeline_parallel_degree": 2, **changes})


def violations(parallelism: ParallelismConfig, *, num_layers: int = 6, batch: int = 8):
    return list(stage_violations(parallelism, num_layers=num_layers, local_batch_size=batch))


def test_a_schedule_from_a_file_is_for_the_run_s_microbatches(tmp_path: Path):
    path = tmp_path / "schedule.csv"
    schedule = schedule_of("Interleaved1F1B", num_ranks=2, num_stages=4, num_microbatches=8)
    schedule_to_csv(schedule, path)
    parallelism = options(pipeline_parallel_schedule_csv=str(path))
    assert violations(parallelism) == []
    assert [v.allowed for v in violations(parallelism, batch=4)] == [
        "a schedule for 4 microbatches; it has 8"
    ]


def test_microbatches_divide_the_batch():
    assert violations(options(pipeline_parallel_microbatch_size=3)) == [
        Violation(
            flag="--parallelism.pipeline_parallel_microbatch_size",
            value=3,
            allowed="a divisor of --training.local_batch_size 8",
            fix="use one of 1, 2, 4, 8",
        )
    ]


@pytest.mark.parametrize(
    ("changes", "layers", "problem"),
    [
        ({"pipeline_parallel_schedule": "2F2B"}, 6, "schedule '2F2B'"),
        ({"pipeline_parallel_degree": 16}, 6, "there are only 8 layers counted"),
    ],
)
def test_what_does_not_fit_is_one_violation_with_the_reason(changes, layers, problem):
    [violation] = violations(options(**changes), num_layers=layers, batch=64)
    assert violation.flag == "--parallelism.pipeline_parallel_schedule"
    assert problem in violation.fix


def test_a_missing_file_is_named():
    [violation] = violations(options(pipeline_parallel_schedule_csv="/no/such.csv"))
    assert violation == Violation(
        flag="--parallelism.pipeline_parallel_schedule_csv",
        value="/no/such.csv",
        allowed="a file that exists",
        fix="give the path of a schedule, or leave the flag out",
    )


def test_without_a_pipeline_nothing_is_judged():
    config = llama3_debugmodel()
    config.parallelism = options(pipeline_parallel_schedule="2F2B")
    assert len([*pipeline_violations(config)]) == 1
    config.parallelism.pipeline_parallel_degree = 1
    assert [*pipeline_violations(config)] == []


def of_tied_weight(*patterns: str) -> list[Violation]:
    config = qwen3_debugmodel()
    config.parallelism = options()
    (group,) = config.optimizer.param_groups
    config.optimizer.param_groups = [replace(group, pattern=each) for each in patterns]
    return [*pipeline_violations(config)]


@pytest.mark.parametrize("patterns", [(".*",), ("norm", ".*"), ("tok_embeddings|lm_head", ".*")])
def test_a_tied_weight_is_updated_alike_by_both_of_its_names(patterns: tuple[str, ...]):
    assert of_tied_weight(*patterns) == []


def test_refuses_a_tied_weight_whose_names_have_other_options():
    assert of_tied_weight("tok_embeddings", ".*") == [
        Violation(
            flag="--optimizer.param_groups",
            value=["tok_embeddings", ".*"],
            allowed="patterns that match tok_embeddings.weight and lm_head.weight alike: this "
            "model ties them, and each of two pipeline stages updates the weight by its own name",
            fix="let one pattern match both, or leave the pipeline out",
        )
    ]


def of_second_group(schedule: str, *, layers_per_stage: int | None, ep: int = 1) -> list[Violation]:
    """Of 8 layers on 2 ranks."""
    config = llama3_debugmodel()
    assert config.model_spec is not None
    layers = config.model_spec.model.layers
    model = replace(config.model_spec.model, layers=[*layers, *layers[:2]])
    config.model_spec = replace(config.model_spec, model=model)
    config.parallelism = options(
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_layers_per_stage=layers_per_stage,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
        expert_parallel_degree=ep,
    )
    config.compile = replace(config.compile, fsdp_second_group=True)
    config.training = replace(config.training, local_batch_size=8)
    return list(pipeline_violations(config))


def test_a_second_group_needs_something_to_run_beside_reductions():
    [violation] = of_second_group("1F1B", layers_per_stage=None)
    assert violation == Violation(
        flag="--compile.fsdp_second_group",
        value=True,
        allowed="False with the schedule 1F1B: no rank gathers parameters after it has begun to "
        "reduce gradients, so that nothing would run beside that",
        fix="leave the flag out, or give each rank more than 3 stages "
        "(--parallelism.pipeline_parallel_layers_per_stage), of which not all are gathered at once",
    )


def test_a_second_group_runs_beside_gathers_of_further_stages():
    """Of four stages on a rank three are gathered at once."""
    [violation] = of_second_group("Interleaved1F1B", layers_per_stage=2)
    assert violation.flag == "--compile.fsdp_second_group"
    assert of_second_group("Interleaved1F1B", layers_per_stage=1) == []


def test_a_second_group_runs_beside_exchanges_of_other_stages():
    assert of_second_group("Interleaved1F1B", layers_per_stage=2, ep=2) == []
    [violation] = of_second_group("1F1B", layers_per_stage=None, ep=2)
    assert "no rank gathers parameters or exchanges tokens after" in violation.allowed


@pytest.mark.parametrize(
    ("schedule", "limit", "puts_off"),
    [("1F1B", 1, "puts off none"), ("DualPipeV", 2, "puts off 2 at most")],
)
def test_a_limit_on_dw_that_changes_nothing_is_refused(schedule: str, limit: int, puts_off: str):
    config = llama3_debugmodel()
    config.parallelism = options(pipeline_parallel_schedule=schedule)
    config.compile = replace(config.compile, pipeline_deferred_weights=limit)
    assert [*pipeline_violations(config)] == [
        Violation(
            flag="--compile.pipeline_deferred_weights",
            value=limit,
            allowed=f"less than the schedule puts off: {schedule} {puts_off}",
            fix="set it to None",
        )
    ]


def test_a_limit_on_dw_that_the_schedule_reaches_is_accepted():
    config = llama3_debugmodel()
    config.parallelism = options(pipeline_parallel_schedule="DualPipeV")
    config.compile = replace(config.compile, pipeline_deferred_weights=1)
    assert [*pipeline_violations(config)] == []


def balanced(**changes: object) -> TrainerParallelismConfig:
    given = {"pipeline_parallel_degree": 2, "pipeline_parallel_balance": "simulated", **changes}
    return TrainerParallelismConfig(**given)


def test_balance_by_simulation_goes_with_a_number_of_stages():
    assert [*balance_violations(balanced(), is_placed=False)] == []
    assert [
        *balance_violations(balanced(pipeline_parallel_layers_per_stage=2), is_placed=False)
    ] == []
    assert [
        *balance_violations(options(pipeline_parallel_first_stage_less_layers=0), is_placed=False)
    ] == []


def test_balance_by_simulation_needs_a_pipeline():
    assert [*balance_violations(balanced(pipeline_parallel_degree=1), is_placed=False)] == [
        Violation(
            flag="--parallelism.pipeline_parallel_balance",
            value="simulated",
            allowed="its default 'layers', since --parallelism.pipeline_parallel_degree is 1 and "
            "it would do nothing",
            fix="drop the option, or use --parallelism.pipeline_parallel_degree 2 or more",
        )
    ]


def test_balance_by_simulation_finds_stages_and_weights_itself():
    names = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    parallelism = balanced(
        module_fqns_per_model_part=names,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=2,
    )
    simulated = "--parallelism.pipeline_parallel_balance simulated"
    assert [*balance_violations(parallelism, is_placed=False)] == [
        Violation(
            flag="--parallelism.module_fqns_per_model_part",
            value=names,
            allowed=f"None with {simulated}, which finds what is on each stage",
            fix="leave out one of the two",
        ),
        Violation(
            flag="--parallelism.pipeline_parallel_first_stage_less_layers",
            value=0,
            allowed=f"its default 1 with {simulated}, which prices what stands before the first "
            "layer",
            fix="leave out one of the two",
        ),
        Violation(
            flag="--parallelism.pipeline_parallel_last_stage_less_layers",
            value=2,
            allowed=f"its default 1 with {simulated}, which prices what stands after the last "
            "layer",
            fix="leave out one of the two",
        ),
    ]


def test_a_balance_of_placed_modules_is_of_runs_that_a_solver_places():
    parallelism = balanced(pipeline_parallel_balance="planned")
    assert [*balance_violations(parallelism, is_placed=True)] == []
    assert [*balance_violations(parallelism, is_placed=False)] == [
        Violation(
            flag="--parallelism.pipeline_parallel_balance",
            value="planned",
            allowed="'layers' or 'simulated' without --compile.autoparallel: no solver places "
            "modules",
            fix="use simulated, or --compile.autoparallel",
        )
    ]


def test_an_unknown_balance_is_refused():
    assert [*balance_violations(balanced(pipeline_parallel_balance="bytes"), is_placed=False)] == [
        Violation(
            flag="--parallelism.pipeline_parallel_balance",
            value="bytes",
            allowed="'layers' or 'simulated' or 'planned'",
            fix="use one of them",
        )
    ]


def test_the_balance_is_judged_before_a_run_starts():
    config = llama3_debugmodel()
    config.parallelism = balanced(pipeline_parallel_degree=1)
    [violation] = pipeline_violations(config)
    assert violation.flag == "--parallelism.pipeline_parallel_balance"
