"""Which products of a model are in 8 bits, and why others are not; torchao is not asked."""

import dataclasses

import pytest

from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.quantization.products import names_in_short, products_of
from gt_trainer.quantization.quantization_options import QuantizationConfig


def reasons(config, **options):
    """Of each kind of module, its precision, or why it is not in 8 bits."""
    found = {}
    for product in products_of(config.model_spec.model, QuantizationConfig(**options)):
        found.setdefault(product.precision or product.why_not, []).append(product.name)
    return {why: names_in_short(names) for why, names in found.items()}


def test_nothing_is_quantized_unless_asked():
    assert reasons(deepseek_v3.deepseek_v3_debugmodel()).keys() == {
        "--quantization.linears is none",
        "--quantization.experts is none",
    }


def test_all_linear_layers_are_but_those_that_skip_names():
    config = llama3.llama3_debugmodel()
    found = reasons(config, linears="float8_rowwise", skip=("lm_head", "wo"))
    assert found["--quantization.skip names 'lm_head'"] == "lm_head"
    assert found["--quantization.skip names 'wo'"] == "layers.0-5.attention.wo"
    assert "layers.0-5.feed_forward.w1" in found["float8_rowwise"]
    assert len(found) == 3


def test_or_those_alone_that_only_names():
    found = reasons(llama3.llama3_debugmodel(), linears="mxfp8", only=("feed_forward",))
    assert found["mxfp8"] == (
        "layers.0-5.feed_forward.w1, layers.0-5.feed_forward.w2, layers.0-5.feed_forward.w3"
    )
    assert "lm_head" in found["--quantization.only does not name it"]


def test_extents_that_8_bit_kernels_cannot_have_are_told():
    config = llama3.llama3_debugmodel()
    head = dataclasses.replace(config.model_spec.model.lm_head, out_features=2040)
    config.model_spec.model.lm_head = head
    found = reasons(config, linears="float8_tensorwise")
    assert found["2040 features: no multiple of 16"] == "lm_head"


def test_experts_are_quantized_apart_from_linear_layers():
    found = reasons(deepseek_v3.deepseek_v3_debugmodel(), experts="mxfp8")
    assert found["mxfp8"] == "layers.1-5.moe.routed_experts.inner_experts"
    assert "--quantization.linears is none" in found


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], ""),
        (["lm_head"], "lm_head"),
        (["layers.0.a.b", "layers.1.a.b", "layers.3.a.b"], "layers.0-1,3.a.b"),
        (["layers.2.x", "layers.2.y", "out"], "layers.2.x, layers.2.y, out"),
        ([f"m{i}" for i in range(10)], "m0, m1, m2, m3, m4, m5, m6, m7, and 2 more"),
    ],
)
def test_like_layers_are_named_together(names, short):
    assert names_in_short(names) == short
