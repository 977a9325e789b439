"""What a model of transformers' cannot be combined with is refused by name."""

from __future__ import annotations

import dataclasses

from gt_config import ConfigError, Topology
from gt_trainer.models import llama3
from gt_trainer.models.hugging_face.causal_model import CausalModel
from gt_trainer.preflight.preflight import hugging_face_violations
from gt_trainer.quantization.quantization_options import QuantizationConfig


def topology(**degrees):
    return Topology(world=64, batch_size=2, seq_len=64, **degrees)


def config(**training):
    made = llama3.llama3_debugmodel()
    model = CausalModel.Config(config_json="{}", vocab_size=2048, max_seq_len=256)
    made.model_spec = dataclasses.replace(made.model_spec, model=model)
    made.training = dataclasses.replace(made.training, **training)
    return made


def test_data_parallelism_is_accepted():
    both = topology(dp_shard=2, dp_replicate=2)
    assert [*hugging_face_violations(config(), both)] == []


def test_nothing_is_said_of_other_models():
    assert [*hugging_face_violations(llama3.llama3_debugmodel(), topology(tp=2))] == []


def test_every_other_axis_is_refused():
    found = [*hugging_face_violations(config(), topology(dp_shard=2, tp=2, cp=2, ep=2, pp=2))]
    assert [each.flag for each in found] == [
        "--parallelism.tensor_parallel_degree",
        "--parallelism.context_parallel_degree",
        "--parallelism.expert_parallel_degree",
        "--parallelism.pipeline_parallel_degree",
    ]
    assert str(ConfigError(found[:1])) == (
        "the configuration has 1 problem:\n"
        "  1. --parallelism.tensor_parallel_degree is 2\n"
        "     allowed: 1 with a model of transformers': it says of no weight how ranks would share "
        "it\n"
        "     fix: use data_parallel_shard_degree or data_parallel_replicate_degree"
    )


def test_solver_quantization_and_long_sequences_are_refused():
    made = config(seq_len=512)
    made.compile = dataclasses.replace(made.compile, autoparallel=True)
    made.quantization = QuantizationConfig(linears="float8_rowwise")
    found = [*hugging_face_violations(made, topology())]
    assert [each.flag for each in found] == [
        "--compile.autoparallel",
        "--quantization",
        "--training.seq_len",
    ]
    assert found[2].allowed == "at most 256, the model's max_position_embeddings"
