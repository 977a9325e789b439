"""What stands in the way of products in 8 bits is said before the start, with the exact text."""

import importlib.metadata

import pytest
from refused_configurations import changed, refusal

from gt_config import EpOverlapConfig
from gt_trainer.device import intended_for
from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.preflight import quantization_violations
from gt_trainer.preflight.preflight import check_configuration

PROBLEM = "the configuration has 1 problem:\n  1. {}\n     allowed: {}\n     fix: {}"
ROWWISE = {"linears": "float8_rowwise", "only": ("feed_forward",)}
FEED_FORWARD = "layers.0-5.feed_forward.w1, layers.0-5.feed_forward.w2, layers.0-5.feed_forward.w3"


@pytest.fixture
def torchao(monkeypatch):
    """Pretends that a version of torchao is installed; None for none."""

    def install(version):
        def of(name):
            if name != "torchao":
                return importlib.metadata.metadata(name)["Version"]
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(quantization_violations.importlib.metadata, "version", of)

    install("0.18.0")
    return install


def refused(tmp_path, make=llama3.llama3_debugmodel, will_train=False, **sections):
    return refusal(changed(make(), tmp_path, **sections), 1, will_train=will_train)


def test_a_run_without_torchao_is_told_what_needs_it(torchao, tmp_path):
    torchao(None)
    assert refused(tmp_path, quantization=ROWWISE) == PROBLEM.format(
        "--quantization.linears is 'float8_rowwise'",
        f"'none' here: torchao is not installed, and 18 linear layers need it: {FEED_FORWARD}",
        "pip install './packages/gt-trainer[float8]' in a clone, or give --quantization.linears none to multiply in the "
        "run's precision",
    )


def test_so_is_a_published_configuration_that_names_a_converter(torchao, tmp_path):
    torchao(None)
    with intended_for("cuda"):
        config = changed(llama3.llama3_405b(), tmp_path)
        text = refusal(config, 1024, will_train=False)
    assert "torchao is not installed, and 630 linear layers need it: layers.0-125.attention" in text
    assert "lm_head" not in text
    with intended_for("cuda"):
        check_configuration(
            changed(config, tmp_path, quantization={"linears": "none", "skip": ()}),
            1024,
            will_train=False,
        )


def test_a_dry_run_without_a_gpu_captures_linear_layers_in_float8_alone(torchao, tmp_path):
    linear = changed(llama3.llama3_debugmodel(), tmp_path, quantization=ROWWISE)
    check_configuration(linear, 1, will_train=False)
    mxfp8 = {**ROWWISE, "linears": "mxfp8"}
    assert refused(tmp_path, quantization=mxfp8) == PROBLEM.format(
        "--quantization.linears is 'mxfp8'",
        "'none' in a capture on a machine without a GPU: torchao casts by kernels that only a GPU "
        f"has, of 18 linear layers: {FEED_FORWARD}",
        "leave the flag out, or capture on a machine with a GPU",
    )
    emulated = changed(linear, tmp_path, quantization={**mxfp8, "emulate": True})
    check_configuration(emulated, 1, will_train=False)


def test_a_torchao_that_is_too_old_is_refused(torchao, tmp_path):
    torchao("0.9.1+cu126")
    quantization = {"experts": "mxfp8", "emulate": True}
    text = refused(tmp_path, deepseek_v3.deepseek_v3_debugmodel, quantization=quantization)
    assert text == PROBLEM.format(
        "--quantization.experts is 'mxfp8'",
        "'none' here: torchao 0.9.1+cu126 is installed, and 0.18 is needed, and 5 experts "
        "need it: layers.1-5.moe.routed_experts.inner_experts",
        "pip install './packages/gt-trainer[float8]' in a clone, or give --quantization.experts none to multiply in the "
        "run's precision",
    )


def test_a_cpu_has_no_kernel_and_may_emulate_it(torchao, tmp_path):
    assert refused(tmp_path, will_train=True, quantization=ROWWISE) == PROBLEM.format(
        "--quantization.linears is 'float8_rowwise'",
        "'none' on cpu, which has no kernel for it (NVIDIA's have from 8.9 on), and 18 linear "
        f"layers need one: {FEED_FORWARD}",
        "give --quantization.emulate to round the same way and multiply in the run's precision, "
        "or --quantization.linears none",
    )
    emulated = changed(
        llama3.llama3_debugmodel(), tmp_path, quantization={**ROWWISE, "emulate": True}
    )
    check_configuration(emulated, 1)


@pytest.mark.parametrize(
    ("capability", "precision", "since"),
    [(8.0, "float8_rowwise", 8.9), (9.0, "float8_rowwise", None), (9.0, "mxfp8", 10.0)],
)
def test_a_gpu_without_the_kernel_is_refused(capability, precision, since, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization_violations, "installed_device_type", lambda: "cuda")
    monkeypatch.setattr(quantization_violations, "best_compute_capability", lambda: capability)
    quantization = {**ROWWISE, "linears": precision}
    config = changed(llama3.llama3_debugmodel(), tmp_path, quantization=quantization)
    told = [each.allowed for each in quantization_violations.device_violations(config)]
    assert told == (
        []
        if since is None
        else [
            (
                f"'none' on a device of compute capability {capability}, which has no kernel for it "
                f"(NVIDIA's have from {since} on), and 18 linear layers need one: {FEED_FORWARD}"
            )
        ]
    )


def test_gathering_parameters_as_they_are_needs_some_that_would_be_quantized(torchao, tmp_path):
    sharded = {"data_parallel_shard_degree": 2}
    options = {"fsdp_quantized_gathers": False}
    mixed = {**ROWWISE, "linears": "float8_rowwise_with_gw_hp"}
    for quantization in ({}, ROWWISE, mixed):
        config = changed(
            llama3.llama3_debugmodel(),
            tmp_path,
            quantization=quantization,
            parallelism=sharded,
            compile=options,
        )
        assert refusal(config, 2, will_train=False) == PROBLEM.format(
            "--compile.fsdp_quantized_gathers is False",
            "its default True, since no linear layer's weight that is gathered has one scale and it "
            "would do nothing",
            "leave the flag out, or give --quantization.linears float8_tensorwise",
        )
    again = {**options, "memory_policy": "selective"}
    check_configuration(changed(config, tmp_path, compile=again), 2, will_train=False)
    quantization = {**ROWWISE, "linears": "float8_tensorwise"}
    config = changed(config, tmp_path, quantization=quantization)
    check_configuration(config, 2, will_train=False)


def test_a_required_layer_that_falls_back_is_refused_by_name(torchao, tmp_path):
    text = refused(
        tmp_path,
        quantization={"linears": "float8_rowwise", "skip": ("lm_head", "layers.3.attention.wo")},
        compile={"require_float8": ("layers.*.attention", "lm_head", "layers.*.feed_forward")},
    )
    fix = "quantize them (--quantization.linears, --quantization.experts), or name fewer"
    assert text == (
        "the configuration has 2 problems:\n"
        "  1. --compile.require_float8 is 'layers.*.attention'\n"
        "     allowed: modules that multiply in 8 bits, and these do not: layers.3.attention.wo "
        "(--quantization.skip names 'layers.3.attention.wo')\n"
        f"     fix: {fix}\n"
        "  2. --compile.require_float8 is 'lm_head'\n"
        "     allowed: modules that multiply in 8 bits, and these do not: lm_head "
        "(--quantization.skip names 'lm_head')\n"
        f"     fix: {fix}"
    )


def test_required_modules_that_multiply_nothing_are_refused(torchao, tmp_path):
    text = refused(tmp_path, quantization=ROWWISE, compile={"require_float8": ("layers.*.norm",)})
    assert "modules with linear layers or experts, which are lm_head, layers.0-5.attention" in text


def test_nothing_is_in_8_bits_where_all_that_is_required_is(torchao, tmp_path):
    text = refused(tmp_path, compile={"require_float8": ("lm_head",)})
    assert "these do not: lm_head (--quantization.linears is none)" in text


def test_products_in_8_bits_are_not_bitwise(torchao, tmp_path):
    text = refused(tmp_path, quantization=ROWWISE, compile={"bitwise": True})
    assert text == PROBLEM.format(
        "--quantization.linears is 'float8_rowwise'",
        "'none' with --compile.bitwise: products in 8 bits are approximate",
        "leave out one of the two",
    )


def test_a_solver_places_no_scales(torchao, tmp_path):
    text = refused(tmp_path, quantization=ROWWISE, compile={"autoparallel": True})
    assert (
        "--quantization.linears is 'float8_rowwise'\n     allowed: 'none' with "
        "--compile.autoparallel: a scale is a maximum over a tensor, and no rule says what that "
        "costs of one that is sharded\n     fix: leave out one of the two"
    ) in text


def test_tokens_that_blocks_do_not_divide_are_refused(torchao, tmp_path):
    text = refused(
        tmp_path,
        quantization={**ROWWISE, "linears": "mxfp8", "emulate": True},
        training={"local_batch_size": 1, "seq_len": 48},
    )
    assert text == PROBLEM.format(
        "--training.seq_len is 48",
        "one with which the 48 tokens that a layer multiplies at once are a multiple of 32, as "
        "gradients of weights need with --quantization.linears mxfp8",
        "use a multiple of 32",
    )


def test_the_output_layer_multiplies_the_tokens_of_a_chunk_of_the_loss(torchao, tmp_path):
    text = refused(
        tmp_path,
        quantization={"linears": "float8_rowwise"},
        training={"local_batch_size": 1, "seq_len": 64},
    )
    assert "one with which the 8 tokens that a layer multiplies at once are a multiple of" in text


def test_chunks_have_scales_of_their_own(torchao, tmp_path):
    config = changed(
        deepseek_v3.deepseek_v3_debugmodel(),
        tmp_path,
        quantization={"linears": "float8_rowwise", "skip": ("lm_head", "router.gate")},
        parallelism={"data_parallel_shard_degree": 2, "expert_parallel_degree": 2},
        compile={"ep_overlap": EpOverlapConfig(enabled=True)},
    )
    assert refusal(config, 2, will_train=False) == PROBLEM.format(
        "--quantization.linears is 'float8_rowwise'",
        "'none' with --compile.ep_overlap.enabled: a scale is a maximum over tokens, and a chunk "
        "of them has another",
        "leave out one of the two",
    )


@pytest.mark.parametrize(
    ("options", "flag", "allowed"),
    [
        ({"emulate": True}, "emulate", "its default False, since nothing is quantized and"),
        ({"skip": ("lm_head",)}, "skip", "its default (), since --quantization.linears is none"),
        (
            {"experts": "mxfp8", "emulate": True},
            "experts",
            "'none': the model has no experts that it would",
        ),
        (
            {"linears": "float8_rowwise", "skip": ("layers", "lm_head")},
            "linears",
            (
                "'none': the model has no linear layers that it would quantize (--quantization.skip "
                "names 'layers'; --quantization.skip names 'lm_head')"
            ),
        ),
        (
            {"linears": "float8_rowwise", "skip": ("lmhead",)},
            "skip",
            "parts of the names of linear layers",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, flag, allowed, torchao, tmp_path):
    text = refused(tmp_path, quantization=options)
    assert text.startswith(f"the configuration has 1 problem:\n  1. --quantization.{flag} is ")
    assert allowed in text
