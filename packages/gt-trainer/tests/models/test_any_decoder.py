"""Configurations of torchtitan's that nobody prepared, adapted or refused with the reason."""

from __future__ import annotations

import dataclasses

import pytest
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.muse_glimmer import config_registry as muse_glimmer
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.data.text_dataloader import StdlibTextDataLoader
from gt_trainer.decoder.attention import DocumentCausalSDPA
from gt_trainer.device import intended_for
from gt_trainer.models.any_decoder import UnadaptableError, adapt_any, is_debug_configuration
from gt_trainer.trainer import GraphTrainer


def refusal(published, *, is_debug=True):
    with pytest.raises(UnadaptableError) as refused:
        adapt_any(published, is_debug=is_debug)
    return str(refused.value)


def test_a_debug_model_trains_on_the_text_at_hand():
    published = gpt_oss.gpt_oss_debugmodel()
    adapted = adapt_any(published, is_debug=True)
    for layer in published.model_spec.model.layers:  # not changed
        assert isinstance(layer.attention.inner_attention, VarlenAttention.Config)
    assert adapted.hf_assets_path == str(shipped_tokenizer_path())
    assert isinstance(adapted.dataloader, StdlibTextDataLoader.Config)
    assert adapted.optimizer.param_groups[0].optimizer_kwargs["lr"] == 8e-4
    for layer in adapted.model_spec.model.layers:
        assert isinstance(layer.attention.inner_attention, DocumentCausalSDPA.Config)


def test_what_a_debug_model_trains_with_otherwise_is_said(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    published = gpt_oss.gpt_oss_debugmodel()
    with caplog.at_level("INFO"):
        adapt_any(published, is_debug=True)
    (line,) = [each for each in caplog.messages if "trains on the text at hand" in each]
    assert line.startswith("gpt_oss debugmodel trains on the text at hand, with hf_assets_path '")
    assert "; dataloader StdlibTextDataLoader in place of HuggingFaceTextDataLoader; " in line
    assert f"; training.steps 20 in place of {published.training.steps}; " in line
    assert f"; training.seq_len 256 in place of {published.training.seq_len}; " in line
    assert line.endswith("; debug.seed 42 in place of None")


def test_debug_models_are_those_of_torchtitans_registries_alone():
    registry = "torchtitan.models.gpt_oss.config_registry"
    assert is_debug_configuration(registry, "gpt_oss_debugmodel")
    assert is_debug_configuration(registry, "gpt_oss_debugmodel_flex")
    assert not is_debug_configuration(registry, "gpt_oss_20b")
    assert not is_debug_configuration("mine.models", "gpt_oss_debugmodel")
    assert not is_debug_configuration("torchtitan_of_mine", "gpt_oss_debugmodel")


def test_ones_own_configuration_is_kept_though_its_assets_are_torchtitans_default():
    published = gpt_oss.gpt_oss_20b()
    published.hf_assets_path = next(
        field.default
        for field in dataclasses.fields(Trainer.Config)
        if field.name == "hf_assets_path"
    )
    published.training.steps, published.debug.seed = 1234, 7
    adapted = adapt_any(published, is_debug=False)
    kept = ("hf_assets_path", "tokenizer", "dataloader", "optimizer", "lr_scheduler", "debug")
    for name in kept:
        assert getattr(adapted, name) == getattr(published, name)
    assert (adapted.training.steps, adapted.training.seq_len) == (1234, published.training.seq_len)
    assert adapted.training.local_batch_size == published.training.local_batch_size
    assert adapted.checkpoint.interval == published.checkpoint.interval
    assert adapted.validator.freq == published.validator.freq
    degree = "expert_parallel_degree"
    assert getattr(adapted.parallelism, degree) == getattr(published.parallelism, degree)


def test_a_published_size_keeps_its_data_and_schedule():
    published = gpt_oss.gpt_oss_20b()
    adapted = adapt_any(published, is_debug=False)
    assert adapted.dataloader == published.dataloader
    assert adapted.lr_scheduler == published.lr_scheduler
    assert adapted.hf_assets_path == published.hf_assets_path


def test_offsets_of_documents_become_masks_on_gpus(caplog):
    with intended_for("cuda"):
        adapted = adapt_any(gpt_oss.gpt_oss_20b(), is_debug=False)
    model = adapted.model_spec.model
    assert not list(model.traverse(VarlenAttention.Config))
    assert len(list(model.traverse(FlexAttention.Config))) == len(model.layers)


def with_window(published, window_size):
    for _, attention, _, _ in published.model_spec.model.traverse(VarlenAttention.Config):
        attention.window_size = window_size
    return published


def test_a_window_that_would_be_lost_is_refused():
    published = with_window(llama3.llama3_debugmodel_varlen_attn(), (128, 0))
    assert refusal(published) == (
        "its VarlenAttention has window_size (128, 0), and neither FlexAttention nor attention on "
        "cpu, which would replace it, has a window: let get_attention_masks of the model make a "
        "mask of it"
    )
    adapt_any(with_window(published, (-1, 0)), is_debug=True)


def test_a_decoder_that_makes_its_own_masks_may_have_windows():
    adapt_any(with_window(gpt_oss.gpt_oss_debugmodel(), (128, 0)), is_debug=True)


class Restrained(Trainer):
    """A trainer of somebody's, which configures nothing of its own."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


def test_somebodys_trainer_is_not_left_out_in_silence():
    published = gpt_oss.gpt_oss_debugmodel()
    fields = {each.name: getattr(published, each.name) for each in dataclasses.fields(published)}
    assert refusal(Restrained.Config(**fields)) == (
        "its trainer Restrained would not run: let it derive from gt_trainer.trainer.GraphTrainer in "
        "place of torchtitan's Trainer"
    )


def test_rules_of_the_published_configuration_are_kept():
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Strict(Trainer.Config):
        def __post_init__(self):
            if self.parallelism.tensor_parallel_degree > 1:
                raise ValueError("its optimizer knows no tensor parallelism")

    published = gpt_oss.gpt_oss_20b()
    values = {each.name: getattr(published, each.name) for each in dataclasses.fields(published)}
    adapted = adapt_any(Strict(**values), is_debug=False)
    assert isinstance(adapted, GraphTrainer.Config)
    sharded = dataclasses.replace(adapted.parallelism, data_parallel_shard_degree=8)
    dataclasses.replace(adapted, parallelism=sharded)
    with pytest.raises(ValueError, match="its optimizer knows no tensor parallelism"):
        dataclasses.replace(
            adapted, parallelism=dataclasses.replace(sharded, tensor_parallel_degree=2)
        )


def with_images(*, may_be_none):
    """A decoder with an encoder of images, which it can be built without or not."""
    published = muse_glimmer.muse_glimmer_debugmodel()
    config = published.model_spec.model
    base = type(config)

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(base):
        vision_encoder: object = None if may_be_none else dataclasses.field(default_factory=object)

    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    model = Config(**values | {"vision_encoder": "an encoder"})
    published.model_spec = dataclasses.replace(published.model_spec, model=model)
    return published


def test_an_encoder_of_images_is_left_out_where_it_may_be():
    assert (
        adapt_any(with_images(may_be_none=True), is_debug=True).model_spec.model.vision_encoder
        is None
    )


def test_a_decoder_that_needs_its_encoder_of_images_is_refused():
    assert refusal(with_images(may_be_none=False)) == (
        "Config cannot be built without vision_encoder, and is given text alone"
    )


def test_data_that_are_images_are_refused():
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Images(BaseDataLoader.Config):
        pass

    published = with_images(may_be_none=True)
    published.dataloader = Images()
    assert refusal(published, is_debug=False).startswith("its data are images (")
    assert refusal(published, is_debug=False).endswith(
        "), of which every batch has another number where a graph has fixed shapes"
    )


def test_layers_of_gated_delta_rules_are_refused():
    published = gpt_oss.gpt_oss_debugmodel()

    @dataclasses.dataclass
    class Hybrid:
        delta_net: object

    published.model_spec.model.layers[1:] = [Hybrid(object()), Hybrid(None)]
    assert refusal(published) == (
        "1 of its 3 layers are GatedDeltaNet, whose kernels (FLA, in Triton) run on GPUs alone and "
        "take the offsets of documents as numbers, which differ in every batch where a graph has "
        "fixed ones"
    )


def test_a_model_that_is_no_decoder_is_refused():
    published = gpt_oss.gpt_oss_debugmodel()
    published.model_spec = None
    assert refusal(published) == (
        "its model is NoneType, which is no Decoder of torchtitan's: a step is captured from tokens "
        "to logits"
    )
