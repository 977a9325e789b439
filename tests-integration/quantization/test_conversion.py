"""What the options make of a model: torchtitan's layers, where the table says that they are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "torchao", reason="torchao is not installed; `make test` runs this folder with it"
)

from torchtitan.components.quantization import (
    Float8Linear,
    Float8LinearConverter,
    MXFP8Linear,
)
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import model_registry

from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.quantization.convert import quantize
from gt_trainer.quantization.products import products_of
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.quantization.quantized_model import precision_lines, with_quantized_model

EVERY_PRECISION = (
    "float8_tensorwise",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "mxfp8",
)


def model_of(config: object) -> object:
    return config.model_spec.model


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("linears", EVERY_PRECISION)
def test_the_layers_that_the_options_name_are_torchtitan_s(linears: str, emulate: bool) -> None:
    model = model_of(llama3.llama3_debugmodel())
    options = QuantizationConfig(linears=linears, skip=("lm_head",), emulate=emulate)
    quantized = quantize(model, options)
    layer = MXFP8Linear if linears == "mxfp8" else Float8Linear
    kinds = {name: type(each) for name, each, _, _ in quantized.traverse(Linear.Config)}
    assert kinds.pop("lm_head") is Linear.Config
    assert len(kinds) == 30
    assert all(issubclass(kind, layer.Config) for kind in kinds.values())
    assert not has_quantization(model), "the model that was given stays as it was"
    # What was asked of the model, and what is found in it, are the same.
    assert list(products_of(model, options)) == list(products_of(quantized, options))
    assert quantize(quantized, options) is quantized


@pytest.mark.parametrize(("linears", "recipe"), [("float8_rowwise", "rowwise")])
def test_a_recipe_is_the_one_that_torchtitan_s_converter_takes(
    linears: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that can, which this test pretends to have."""
    monkeypatch.setattr(
        "torchtitan.components.quantization.float8.has_cuda_capability", lambda *_: True
    )
    converter = Float8LinearConverter.Config(recipe_name=recipe, filter_fqns=["lm_head"])
    theirs = model_registry("debugmodel", attn_backend="flex", converters=[converter]).model
    options = QuantizationConfig(linears=linears, skip=("lm_head",))
    ours = quantize(model_registry("debugmodel", attn_backend="flex").model, options)

    def recipes(model: object) -> dict[str, object]:
        return {
            n: getattr(e, "_torchao_config", None) for n, e, _, _ in model.traverse(Linear.Config)
        }

    assert recipes(ours) == recipes(theirs)
    # One that torchtitan has converted is taken as it is, and told.
    nothing_asked = QuantizationConfig()
    assert quantize(theirs, nothing_asked) is theirs
    found = {each.name: each.precision for each in products_of(theirs, nothing_asked)}
    assert found["lm_head"] is None
    rest = quantize(theirs, QuantizationConfig(linears="mxfp8"))
    assert {each.name: each.precision for each in products_of(rest, nothing_asked)} == {
        **found,
        "lm_head": "mxfp8",
    }
    assert found["layers.0.attention.wo"] == "float8_rowwise"


def test_experts_are_quantized_with_or_without_linear_layers() -> None:
    model = model_of(deepseek_v3.deepseek_v3_debugmodel())
    for experts in ("float8_rowwise", "mxfp8"):
        options = QuantizationConfig(experts=experts, emulate=True)
        found = {each.precision for each in products_of(quantize(model, options), options)}
        assert found == {None, experts}


@pytest.mark.parametrize("experts", ["float8_rowwise", "mxfp8"])
def test_experts_on_gpus_are_torchtitan_s_with_padded_tokens(experts: str) -> None:
    model = model_of(deepseek_v3.deepseek_v3_debugmodel())
    options = QuantizationConfig(experts=experts)
    quantized = quantize(model, options)
    (mixture, *_) = [layer.moe for layer in quantized.layers if layer.moe is not None]
    routed = mixture.routed_experts
    assert routed.token_dispatcher.pad_multiple == (32 if experts == "mxfp8" else 16)
    assert {each.precision for each in products_of(quantized, options)} == {None, experts}


def test_the_table_names_every_product_with_its_precision_and_why_not() -> None:
    config = deepseek_v3.deepseek_v3_debugmodel()
    config.quantization = QuantizationConfig(
        linears="float8_rowwise",
        only=("feed_forward", "shared_experts"),
        experts="mxfp8",
        emulate=True,
    )
    lines = precision_lines(
        model_of(with_quantized_model(config)), config.quantization, own_precision="float32"
    )
    attention = ", ".join(f"layers.0-5.attention.{name}" for name in ("wq", "wkv_a", "wkv_b", "wo"))
    dense = ", ".join(f"layers.0.feed_forward.w{number}" for number in (1, 2, 3))
    shared = ", ".join(f"layers.1-5.moe.shared_experts.w{number}" for number in (1, 2, 3))
    assert lines == (
        "Precision of matrix products, emulated:",
        f"  linear layers in float8_rowwise, 18: {dense}, {shared}",
        "  experts of mixtures in mxfp8, 5: layers.1-5.moe.routed_experts.inner_experts",
        (
            "  linear layers in float32 (--quantization.only does not name it), 30: lm_head, "
            f"{attention}, layers.1-5.moe.router.gate"
        ),
    )


def test_a_model_in_one_precision_has_no_table() -> None:
    model = model_of(llama3.llama3_debugmodel())
    assert precision_lines(model, QuantizationConfig(), own_precision="float32") == ()


def test_checkpoints_are_of_the_same_tensors_quantized_or_not() -> None:
    config = llama3.llama3_debugmodel()
    shapes = []
    for linears in ("none", "float8_rowwise", "mxfp8"):
        config.quantization = QuantizationConfig(linears=linears)
        with torch.device("meta"):
            tensors = model_of(with_quantized_model(config)).build().state_dict()
        shapes.append({name: (each.shape, each.dtype) for name, each in tensors.items()})
    assert shapes[0] == shapes[1] == shapes[2]
