"""Settings that the bounds of a search do not hold for are refused before it, each by name."""

from dataclasses import replace

import pytest

from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.plan_run import UNPLANNED, PlanQuestion, check_plannable, make_plan


def _with(config, flag, value):
    group, name = flag.removeprefix("--").split(".")
    setattr(config, group, replace(getattr(config, group), **{name: value}))


_OTHERS = {
    "--compile.mode": "none",
    "--compile.autoparallel": True,
    "--compile.disable_passes": ("fsdp_bucketing",),
    "--compile.fsdp_second_group": True,
    "--compile.full_recompute_saved_ops": ("aten.mm.default",),
    "--compile.passes": ("mine",),
    "--parallelism.module_fqns_per_model_part": [["tok_embeddings"], ["layers.0"]],
    "--parallelism.pipeline_parallel_balance": "cost",
    "--parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "--parallelism.pipeline_parallel_last_stage_less_layers": 2,
    "--parallelism.pipeline_parallel_layers_per_stage": 3,
    "--parallelism.pipeline_parallel_schedule_csv": "mine.csv",
    "--quantization.experts": "float8_rowwise",
    "--training.enable_cpu_offload": True,
}


def test_a_configuration_as_published_can_be_planned():
    check_plannable(llama3_debugmodel())


@pytest.mark.parametrize("flag", UNPLANNED)
def test_each_other_value_is_refused_by_name(flag):
    config = llama3_debugmodel()
    _with(config, flag, _OTHERS[flag])
    with pytest.raises(NoRecipeError) as raised:
        check_plannable(config)
    planned, reason = UNPLANNED[flag]
    assert str(raised.value) == (
        f"no plan can be made with these settings:\n"
        f"  {flag} is {_OTHERS[flag]!r}, and must be {planned!r}: {reason}"
    )


def test_logits_in_8_bits_are_refused_however_they_were_asked_for():
    config = llama3_debugmodel()
    with pytest.raises(NoRecipeError, match=r"--quantization\.skip is \(\), and must have 'lm_he"):
        check_plannable(config, asked={"--quantization.skip"})
    config.quantization.skip = ("attention",)
    with pytest.raises(NoRecipeError, match=r"skip is \('attention',\), and must have 'lm_head'"):
        check_plannable(config)
    config.quantization.skip = ("attention", "lm_head")
    check_plannable(config, asked={"--quantization.skip"})


def test_other_optimizers_than_adam_are_refused():
    config = llama3_debugmodel()
    config.optimizer.param_groups[0].optimizer_name = "SGD"
    with pytest.raises(NoRecipeError, match="the optimizer is 'SGD', and must be Adam or AdamW"):
        check_plannable(config)


def test_a_plan_refuses_before_it_searches_and_names_all():
    config = llama3_debugmodel()
    for flag, value in _OTHERS.items():
        _with(config, flag, value)
    question = PlanQuestion(
        cluster=load_cluster("h100_sxm"), num_gpus=8, what_if={}, fixed={}, model_flags=""
    )
    with pytest.raises(NoRecipeError) as raised:
        make_plan(config, question)
    assert all(f"\n  {flag} is " in str(raised.value) for flag in UNPLANNED)
