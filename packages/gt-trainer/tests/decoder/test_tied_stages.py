"""torchtitan's decoders with a tied weight, told that their stages are ours."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3 import config_registry

from gt_trainer.decoder.tied_stages import (
    EMBEDDING,
    PROJECTION,
    adapter_of_stages,
    allow_tied_stages,
)
from gt_trainer.model_identity import explain_difference, identity_of
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.models.qwen3 import qwen3_debugmodel
from gt_trainer.trainer import GraphTrainer


def on_stages(**parallelism: Any) -> GraphTrainer.Config:
    config = qwen3_debugmodel()
    config.parallelism = dataclasses.replace(
        config.parallelism, pipeline_parallel_degree=2, **parallelism
    )
    return config


def published() -> Any:
    spec = config_registry.qwen3_debugmodel().model_spec
    assert spec is not None
    return spec


def test_torchtitan_refuses_its_own_and_not_ours():
    config = on_stages()
    with pytest.raises(NotImplementedError, match="Weight tying"):
        published().model.update_from_config(config=config)
    allowed = allow_tied_stages(published().model)
    allowed.update_from_config(config=config)
    assert config.parallelism.pipeline_parallel_degree == 2
    assert allowed.layers[0].attention.rope.max_seq_len == config.training.seq_len


def test_whatever_else_torchtitan_checks_is_checked():
    with pytest.raises(ValueError, match="must divide"):
        allow_tied_stages(published().model).update_from_config(
            config=on_stages(tensor_parallel_degree=3)
        )


def test_it_is_the_same_model_with_the_weight_tied():
    spec = published()
    ours = dataclasses.replace(spec, model=allow_tied_stages(spec.model))
    assert explain_difference(identity_of(spec), identity_of(ours)) is None
    assert isinstance(ours.model, type(spec.model))
    with torch.device("meta"):
        model = copy.deepcopy(ours.model).build()
    assert type(model) is type(spec.model)._owner
    assert model.tok_embeddings.weight is model.lm_head.weight


def test_our_configurations_have_it_where_a_weight_is_tied_and_only_there():
    qwen3, llama3 = qwen3_debugmodel().model_spec, llama3_debugmodel().model_spec
    assert qwen3 is not None
    assert llama3 is not None
    assert type(qwen3.model) is type(allow_tied_stages(published().model))
    assert type(llama3.model) is Llama3Model.Config
    assert llama3.state_dict_adapter is not None
    assert llama3.state_dict_adapter.__name__ == "Llama3StateDictAdapter"


@pytest.fixture
def adapter() -> Any:
    spec = published()
    spec.model.update_from_config(config=qwen3_debugmodel())
    return adapter_of_stages(spec.state_dict_adapter)(spec.model, None)


WEIGHT, NORM = torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("state", "file"),
    [
        ({EMBEDDING: WEIGHT, PROJECTION: WEIGHT}, {"model.embed_tokens.weight": WEIGHT}),
        ({EMBEDDING: WEIGHT}, {"model.embed_tokens.weight": WEIGHT}),
        (
            {"norm.weight": NORM, PROJECTION: WEIGHT},
            {"model.norm.weight": NORM, "model.embed_tokens.weight": WEIGHT},
        ),
        ({"norm.weight": NORM}, {"model.norm.weight": NORM}),
    ],
    ids=["whole", "first stage", "last stage", "neither"],
)
def test_the_weight_is_the_embedding_of_a_file_from_whatever_stage(
    adapter: Any, state: dict[str, torch.Tensor], file: dict[str, torch.Tensor]
):
    written = adapter.to_hf(state)
    assert written.keys() == file.keys()
    assert all(written[name] is file[name] for name in file)
    read = adapter.from_hf(written)
    assert state.keys() <= read.keys()
    assert all(read[name] is state[name] for name in state)
    assert (PROJECTION in read) == (EMBEDDING in read)


def test_an_index_of_files_names_the_weight_once_on_every_stage(tmp_path):
    index = '{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    spec = published()
    assert spec.state_dict_adapter(spec.model, str(tmp_path)).fqn_to_index_mapping
    ours = adapter_of_stages(spec.state_dict_adapter)(spec.model, str(tmp_path))
    assert not ours.fqn_to_index_mapping
