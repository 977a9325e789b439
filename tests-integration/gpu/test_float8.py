"""Float8 products of torchao's, as the GPU computes them; a CPU emulates them."""

from __future__ import annotations

import dataclasses

import pytest
from gpu.models import captured_step, decoder, eager_step, recipe, train
from gpu.sites import Site
from torch import nn

from gt_passes import release_cuda_graphs

torchao_float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed here")

_RECIPES = (
    "rowwise",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorwise", "rowwise_with_gw_hp")),
)


def float8_decoder(site: Site, name: str) -> nn.Module:
    """The decoder, whose linear layers multiply in float8, but for the last."""
    model = decoder(site).bfloat16()
    config = torchao_float8.Float8LinearConfig.from_recipe_name(name)
    if site.device.type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    torchao_float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, fqn: fqn != "output"
    )
    return model


@pytest.mark.parametrize("name", _RECIPES)
def test_eager_captured_and_replayed_float8_training_are_the_same_to_the_bit(
    site: Site, name: str
) -> None:
    model = float8_decoder(site, name)
    eager = train(site, eager_step(model), model)
    captured = captured_step(site, float8_decoder(site, name), passes=recipe(site))
    targets = {str(node.target) for node in captured.step.graph_module.graph.nodes}
    assert ("aten._scaled_mm.default" in targets) == (site.device.type == "cuda")
    assert eager.differences(train(site, captured.bound(), captured.model)) == []
    replayed = captured_step(site, float8_decoder(site, name), passes=recipe(site, recorded=True))
    assert eager.differences(train(site, replayed.bound(), replayed.model)) == []
    assert replayed.counts("cuda-graphs")["pieces"] == 1
    release_cuda_graphs(replayed.step.graph_module)


def test_float8_rounds(site: Site) -> None:
    """Or equal bits would say nothing."""
    plain = decoder(site).bfloat16()
    quantized = float8_decoder(site, "rowwise")
    assert train(site, eager_step(plain), plain).differences(
        train(site, eager_step(quantized), quantized)
    )


def test_a_float8_step_compiled_as_a_whole_trains_alike(gpu: Site) -> None:
    model = float8_decoder(gpu, "rowwise")
    eager = train(gpu, eager_step(model), model)
    compiled = captured_step(
        gpu, float8_decoder(gpu, "rowwise"), passes=recipe(gpu, inductor_compilation="full")
    )
    trained = train(gpu, compiled.bound(), compiled.model)
    difference = max(
        float((ours - theirs).abs() / theirs.abs())
        for ours, theirs in zip(trained.losses, eager.losses, strict=True)
    )
    assert difference < 0.01, difference
