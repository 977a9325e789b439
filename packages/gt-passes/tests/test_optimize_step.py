"""The default recipe in one call."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from gt_config import CompileConfig, ConfigError
from gt_passes import (
    PassContext,
    RecomputeTagged,
    TagSavedTensors,
    default_recipe,
    known_passes,
    optimize,
    optimize_step,
    recipes,
)
from gt_trace import TracedStep, graph_text, trace_step

X = torch.rand(8, 4)


def captured() -> tuple[nn.Module, TracedStep]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in layers:
            x = x + layer(x)
        loss = x.square().mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    return model, trace_step(step, module=model)(X)


def test_it_is_the_default_recipe_on_the_context_of_the_step():
    _, one = captured()
    _, other = captured()
    options = CompileConfig(memory_policy="full_recompute")
    report = optimize(one, options)
    expected = default_recipe(options, context=PassContext.of_step(other))
    expected.run(other.graph_module)
    assert [each.name for each in report.records] == [each.name for each in expected.passes]
    assert "recompute-tagged" in [each.name for each in report.records]
    assert graph_text(one.graph_module) == graph_text(other.graph_module)


def test_the_context_of_a_step_names_its_parameters():
    model, traced = captured()
    context = PassContext.of_step(traced)
    assert context.static_input_names == tuple(name for name, _ in model.named_parameters())
    assert context.fake_mode is traced.fake_mode


def test_a_bound_step_runs_what_the_passes_made_to_the_same_bits():
    model, traced = captured()
    bound = traced.bind(model)
    before = bound(X)
    optimize(traced, CompileConfig(memory_policy="full_recompute"))
    assert all(torch.equal(a, b) for a, b in zip(bound(X), before, strict=True))


def test_passes_may_be_given_instead(tmp_path: Path):
    _, traced = captured()
    passes = [TagSavedTensors(policy="full_recompute"), RecomputeTagged()]
    report = optimize(traced, passes=passes, dump_directory=tmp_path)
    assert [each.name for each in report.records] == ["tag-saved-tensors", "recompute-tagged"]
    assert report.records[1].report.counts["recomputed"] > 0
    assert (tmp_path / "summary.txt").exists()


def test_a_value_that_no_run_can_have_is_refused_with_all_others():
    _, traced = captured()
    options = CompileConfig(memory_policy="selectiv", passes=("remove-dead-cod",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        optimize(traced, options)
    assert str(error.value) == (
        "the configuration has 2 problems:\n"
        "  1. CompileConfig.memory_policy is 'selectiv'\n"
        "     allowed: 'save_all', 'selective', 'selective_alternate', 'full_recompute' or 'offload'\n"
        "     fix: did you mean 'selective'?\n"
        "  2. CompileConfig.passes is 'remove-dead-cod'\n"
        "     allowed: the registered passes: "
        + ", ".join(known_passes())
        + "\n     fix: did you mean 'remove-dead-code'?"
    )


def test_what_needs_experts_is_not_judged_by_a_mesh_that_nobody_named():
    _, traced = captured()
    report = optimize(traced, CompileConfig(fsdp_into_dense_regions=True))
    assert "schedule-fsdp-into-dense-regions" in [each.name for each in report.records]


def test_options_that_would_do_nothing_are_refused_by_name():
    _, traced = captured()
    with pytest.raises(ConfigError) as error:
        optimize(traced, CompileConfig(mode="aot_joint", debug_graph_passes=True))
    assert str(error.value) == (
        "the configuration has 2 problems:\n"
        "  1. CompileConfig.mode is 'aot_joint'\n"
        "     allowed: its default 'aot_fx_trace': no pass on a captured step reads it\n"
        "     fix: leave it out\n"
        "  2. CompileConfig.debug_graph_passes is True\n"
        "     allowed: its default False: no pass on a captured step reads it\n"
        "     fix: leave it out"
    )


def test_every_option_is_read_by_the_recipe_or_refused():
    read = inspect.getsource(recipes) + inspect.getsource(optimize_step.optimize)
    for field in dataclasses.fields(CompileConfig):
        assert (f"options.{field.name}" in read) or field.name in optimize_step._OF_NO_CAPTURED_STEP
