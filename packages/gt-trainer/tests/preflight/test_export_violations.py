"""Weights that an export would lose are told of before the run."""

from __future__ import annotations

import dataclasses

from torchtitan.models.gpt_oss import config_registry as gpt_oss

from gt_config import ConfigError
from gt_trainer.models import deepseek_v3, llama3, qwen3
from gt_trainer.models.any_decoder import adapt_any
from gt_trainer.preflight.preflight import export_violations


def text(config, **checkpoint):
    asked = {"last_save_model_only": True, "last_save_in_hf": True, **checkpoint}
    config.checkpoint = dataclasses.replace(config.checkpoint, **asked)
    found = [*export_violations(config)]
    return str(ConfigError(found)) if found else ""


def test_adapters_that_know_every_parameter_are_accepted():
    for config in (
        llama3.llama3_debugmodel,
        qwen3.qwen3_debugmodel,
        qwen3.qwen3_moe_debugmodel,
        deepseek_v3.deepseek_v3_debugmodel,
    ):
        assert text(config()) == ""


def test_an_adapter_that_leaves_parameters_out_is_refused():
    assert text(adapt_any(gpt_oss.gpt_oss_debugmodel(), is_debug=True)) == (
        "the configuration has 1 problem:\n"
        "  1. --checkpoint.last_save_in_hf is True\n"
        "     allowed: False for gpt_oss debugmodel: torchtitan's GptOssStateDictAdapter leaves out "
        "16 of its 71 parameters, layers.0.moe.routed_experts.inner_experts.mlp1_bias_EG among them\n"
        "     fix: leave the flag out"
    )


def test_a_model_without_an_adapter_is_refused():
    config = llama3.llama3_debugmodel()
    config.model_spec = dataclasses.replace(config.model_spec, state_dict_adapter=None)
    assert text(config).splitlines()[2] == (
        "     allowed: False for llama3, which has no state_dict_adapter"
    )


def test_nothing_is_judged_where_nothing_is_exported():
    config = adapt_any(gpt_oss.gpt_oss_debugmodel(), is_debug=True)
    assert text(config, last_save_in_hf=False) == ""
    assert text(config, enable=False) == ""
