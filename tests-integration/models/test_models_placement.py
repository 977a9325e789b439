"""Placed models, captured: what the output projection communicates, tied weights, refusals.

Placement needs ranks but these facts do not: torch's fake process group stands for four of them.
"""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_trace import read_annotation, trace_step
from gt_trainer.decoder.attention import document_causal_mask
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.models.qwen3 import qwen3_debugmodel
from gt_trainer.steps.captured_step import training_step

BATCH, LENGTH, NUM_LAYERS = 2, 64, 2


@pytest.fixture
def fake_world():
    def start(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        set_spmd_backend("partial_dtensor")

    yield start
    dist.destroy_process_group()


def make_placed_model(config, world_size, **parallelism):
    config.parallelism = dataclasses.replace(config.parallelism, **parallelism)
    config.model_spec.model.layers = config.model_spec.model.layers[:NUM_LAYERS]
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims.from_config(config.parallelism, world_size),
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def capture(config, model):
    loss_fn = config.loss.build(compile_config=config.compile)
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    tokens = torch.randint(2048, (BATCH, LENGTH))
    extra = {"positions": positions, "attention_masks": document_causal_mask(positions)}
    step = training_step(model, loss_fn)
    return trace_step(step, module=model)(tokens, tokens, torch.tensor(BATCH * LENGTH), extra)


def collectives_of(traced, parameter):
    """Counts the kinds of collective that data parallelism runs for one parameter."""
    found = Counter()
    for node in traced.graph_module.graph.nodes:
        annotation = read_annotation(node, FsdpCollectiveAnnotation)
        operator = str(node.target).split(".")
        if annotation is None or parameter not in annotation.parameter_names:
            continue
        if operator[0] == "_c10d_functional" and operator[1] != "wait_tensor":
            found[operator[1]] += 1
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_the_chunked_loss_gathers_the_projection_once_and_reduces_it_once(fake_world, tp):
    fake_world(4)
    config = llama3_debugmodel()
    assert config.loss.num_chunks > 1
    model = make_placed_model(config, 4, tensor_parallel_degree=tp)
    traced = capture(config, model)
    assert collectives_of(traced, "lm_head.weight") == {
        "all_gather_into_tensor": 1,
        "reduce_scatter_tensor": 1,
    }


def test_tied_weights_stay_one_parameter_through_placement_and_initialization(fake_world):
    fake_world(4)
    config = qwen3_debugmodel()
    assert config.model_spec.model.enable_weight_tying
    model = make_placed_model(config, 4, tensor_parallel_degree=2)
    assert model.tok_embeddings.weight is model.lm_head.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tok_embeddings.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize(
    ("degrees", "modes"),
    [
        ({"data_parallel_replicate_degree": 1}, {"fsdp"}),
        ({"data_parallel_replicate_degree": 2}, {"dp_replicate", "fsdp"}),
        ({"data_parallel_replicate_degree": 4}, {"dp_replicate"}),
    ],
    ids=["FSDP", "HSDP", "DDP"],
)
def test_the_degrees_choose_the_mode_of_data_parallelism(fake_world, degrees, modes):
    fake_world(4)
    model = make_placed_model(llama3_debugmodel(), 4, **degrees)
    assert {axis for p in model.parameters() for axis in p.device_mesh.mesh_dim_names} == modes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_computes_in_the_mixed_precision_dtype(fake_world, dtype):
    fake_world(1)
    config = llama3_debugmodel()
    config.training = dataclasses.replace(config.training, mixed_precision_param=dtype)
    model = make_placed_model(config, 1)
    seen = []
    model.layers["0"].attention.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    mask = document_causal_mask(positions)
    model(torch.zeros(BATCH, LENGTH, dtype=torch.int64), positions, mask)
    assert seen == [getattr(torch, dtype)]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
