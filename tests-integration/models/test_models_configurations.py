"""Every configuration of the catalog: it exists, it asks for what capture needs, it can be placed.

Placement runs on the meta device with torch's fake process group, as one rank of the intended
world, so sizes that no test machine could hold are covered too.
"""

import importlib
import inspect
import re

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import RoutedExperts

from gt_trainer import device
from gt_trainer.decoder.attention import DocumentCausalSDPA
from gt_trainer.decoder.chunked_loss import GraphChunkedLoss
from gt_trainer.models.catalog import CATALOG
from gt_trainer.placement.parallelize import parallelize
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.trainer import GraphTrainer

ENTRIES = [entry for table in CATALOG.values() for entry in table.values()]
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.config)

# Parameters in billions as the models' names or their papers have them, to two digits.
PUBLISHED_SIZES = {
    "llama3_8b": 8.0,
    "llama3_70b": 71,
    "llama3_405b": 406,
    "qwen3_14b": 15,
    "deepseek_v3_16b": 16,
    "deepseek_v3_671b": 671,
}


def make_config(entry) -> GraphTrainer.Config:
    module = importlib.import_module(f"gt_trainer.models.{entry.module}")
    return getattr(module, entry.config)()


def place(model, config, parallel_dims):
    parallelize(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )


@pytest.fixture
def world(entry):
    """One rank of the intended world, whose collectives do nothing."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=1 % entry.world_size, world_size=entry.world_size
    )
    set_spmd_backend("partial_dtensor")
    yield entry.world_size
    dist.destroy_process_group()


def test_the_catalog_lists_every_configuration_and_nothing_else():
    for name, table in CATALOG.items():
        module = importlib.import_module(f"gt_trainer.models.{name}")
        functions = {
            function
            for function, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not function.startswith("_")
        }
        assert functions == set(table)


@every_entry
def test_a_configuration_asks_for_what_capture_needs(entry):
    config = make_config(entry)
    assert isinstance(config, GraphTrainer.Config)
    assert config.parallelism.spmd_backend == "partial_dtensor"
    assert config.training.disable_cuda_graphs
    assert config.activation_checkpoint is None
    assert config.model_spec.parallelize_fn is parallelize
    assert isinstance(config.loss, GraphChunkedLoss.Config)
    assert isinstance(config.loss.loss_fn, CrossEntropyLoss.Config)
    assert config.training.seq_len % config.loss.num_chunks == 0


@every_entry
def test_the_cpu_gets_an_attention_that_has_a_backward_there(entry):
    assert device.installed_device_type() == "cpu"
    model = make_config(entry).model_spec.model
    assert not list(model.traverse(FlexAttention.Config))
    assert {type(layer.attention.inner_attention) for layer in model.layers} == {
        DocumentCausalSDPA.Config
    }


@pytest.mark.parametrize("name", ["debugmodel_sdpa", "16b_sdpa"])
def test_scaled_dot_products_are_kept_on_gpus(name):
    entries = CATALOG["deepseek_v3"]
    with device.intended_for("cuda"):
        config, other = (
            make_config(entries[f"deepseek_v3_{name}"]),
            make_config(entries[f"deepseek_v3_{name.removesuffix('_sdpa')}"]),
        )
    assert not [*config.model_spec.model.traverse(FlexAttention.Config)]
    found = [*config.model_spec.model.traverse(DocumentCausalSDPA.Config)]
    assert len(found) == len([*other.model_spec.model.traverse(FlexAttention.Config)]) > 0


@every_entry
def test_a_configuration_can_be_placed_at_its_intended_world_size(entry, world):
    config = make_config(entry)
    parallel_dims = ParallelDims.from_config(config.parallelism, world)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    num_parameters = sum(p.numel() for p in model.parameters())
    if entry.config in PUBLISHED_SIZES:
        assert float(f"{num_parameters / 1e9:.2g}") == pytest.approx(
            PUBLISHED_SIZES[entry.config], rel=0.06
        )
    num_experts_before = [
        p.shape[0] for m in model.modules() if isinstance(m, RoutedExperts) for p in m.parameters()
    ]
    place(model, config, parallel_dims)
    parameters = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) for p in parameters.values())
    # Sharding loses nothing: global shapes are as before, and one rank holds its share of them.
    assert sum(p.numel() for p in parameters.values()) == num_parameters
    experts = [p for m in model.modules() if isinstance(m, RoutedExperts) for p in m.parameters()]
    assert [p.shape[0] for p in experts] == num_experts_before
    if parallel_dims.ep_enabled:
        assert experts
        assert all("ep" in p.device_mesh.mesh_dim_names for p in experts)
    num_local = sum(p.to_local().numel() for p in parameters.values())
    # Without a cut into stages: every pipeline rank would hold all layers.
    assert num_local == pytest.approx(num_parameters / (world // parallel_dims.pp), rel=0.02)


@every_entry
def test_the_description_names_the_parallel_degrees(entry):
    parallelism = make_config(entry).parallelism
    degrees = {
        "TP": parallelism.tensor_parallel_degree,
        "EP": parallelism.expert_parallel_degree,
        "PP": parallelism.pipeline_parallel_degree,
    }
    for name, degree in degrees.items():
        stated = re.search(rf"{name} (\d+)", entry.description)
        assert (1 if stated is None else int(stated[1])) == degree
    shards = re.search(r"FSDP (\d+)", entry.description)
    num_shards = entry.world_size // degrees["TP"] // degrees["PP"]
    assert (1 if shards is None else int(shards[1])) == num_shards


@pytest.mark.parametrize("name", ["llama3_405b", "llama3_405b_pp"])
def test_405b_keeps_the_converter_that_it_is_published_with(name):
    # torchtitan's: Float8LinearConverter, recipe rowwise, filter_fqns lm_head.
    assert make_config(CATALOG["llama3"][name]).quantization == QuantizationConfig(
        linears="float8_rowwise", skip=("lm_head",)
    )


def test_replaced_attention_is_said_once_for_a_configuration(caplog):
    with caplog.at_level("INFO"):
        make_config(CATALOG["llama3"]["llama3_8b"])
    said = [r.getMessage() for r in caplog.records if "FlexAttention" in r.getMessage()]
    assert said == [
        "FlexAttention has no backward on cpu: llama3 8B attends with DocumentCausalSDPA here"
    ]


def test_replaced_experts_are_said_once_for_a_configuration(caplog):
    with caplog.at_level("INFO"):
        make_config(CATALOG["qwen3"]["qwen3_moe_debugmodel"])
        make_config(CATALOG["deepseek_v3"]["deepseek_v3_16b"])  # published: torchtitan's experts
        make_config(CATALOG["llama3"]["llama3_debugmodel"])  # has none
    (said,) = [r.getMessage() for r in caplog.records if "experts" in r.getMessage()]
    assert said == (
        "qwen3 debugmodel_moe has experts that compute in the run's precision on cpu "
        "(--training.mixed_precision_param); torchtitan's compute in bfloat16 whatever it is"
    )


def test_a_vocabulary_that_tp_and_fsdp_split_unevenly_is_sharded_along_the_width():
    entry = CATALOG["llama3"]["llama3_405b"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=entry.world_size)
    try:
        set_spmd_backend("partial_dtensor")
        config = make_config(entry)
        parallel_dims = ParallelDims.from_config(config.parallelism, entry.world_size)
        config.model_spec.model.layers = config.model_spec.model.layers[:1]
        config.model_spec.model.update_from_config(config=config)
        with torch.device("meta"):
            model = config.model_spec.model.build()
        place(model, config, parallel_dims)
    finally:
        dist.destroy_process_group()
    tp, fsdp = 8, 128
    for name in ("tok_embeddings", "lm_head"):
        weight = model.get_parameter(f"{name}.weight")
        assert weight.to_local().shape == (128256 // tp, 16384 // fsdp)
    assert model.get_parameter("layers.0.attention.wo.weight").to_local().shape == (
        16384 // fsdp,
        16384 // tp,
    )
