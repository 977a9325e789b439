"""A sharded module as its users meet it: reads, hooks, initialization, tying, copies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fsdp_cases import Experts, Language, Mixture
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gt_trace.fsdp import gathered, shard
from gt_trace.testing import fake_world

TOKENS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(rank=1, world_size=4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("data",))


class Recorder(nn.Module):
    """Notes what it reads in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 2))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight)
        self.seen.append(self.weight)
        return x @ self.weight.t()


def test_reads_are_stored_outside_a_forward_and_gathered_inside(mesh: DeviceMesh) -> None:
    model = Recorder()
    shard(model, mesh, mode="shard")
    stored = model.weight
    assert isinstance(stored, DTensor)
    assert stored.shape == (5, 2)
    assert stored.to_local().shape == (2, 2)
    model(torch.ones(1, 2))
    first, second = model.seen
    assert type(first) is torch.Tensor
    assert first.shape == (5, 2)
    assert second is first
    assert model.weight is stored


def test_without_gradients_nothing_gathered_is_kept(mesh: DeviceMesh) -> None:
    model = Recorder()
    shard(model, mesh, mode="shard")
    with torch.no_grad():
        model(torch.ones(1, 2))
    first, second = model.seen
    assert second is not first


def test_a_parameter_written_within_a_forward_is_gathered_again(mesh: DeviceMesh) -> None:
    model = Recorder()
    shard(model, mesh, mode="shard")
    with gathered(model):
        before = model.weight
        with torch.no_grad():
            model._parameters["weight"].add_(1)
        assert model.weight is not before


def test_the_last_ranks_shard_may_be_short_or_empty(mesh: DeviceMesh) -> None:
    model = nn.ParameterList([torch.ones(extent, 3) for extent in (4, 2, 1)])
    shard(model, mesh, mode="shard")
    assert [p.to_local().shape[0] for p in model.parameters()] == [1, 1, 0]


def test_a_forward_that_raises_leaves_parameters_stored(mesh: DeviceMesh) -> None:
    model = Language()
    shard(model, mesh, mode="shard")
    with pytest.raises(IndexError):
        model(TOKENS + 1000)
    assert isinstance(model.embedding.weight, DTensor)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model(TOKENS)


def test_a_pre_hook_that_raises_leaves_parameters_stored_and_the_next_forward_whole(
    mesh: DeviceMesh,
) -> None:
    model = nn.Sequential(nn.Linear(2, 5))

    def refuse(module: nn.Module, args: Any) -> None:
        raise RuntimeError("refused")

    # It stands before ours, so that ours never sees this forward begin.
    refusal = model[0].register_forward_pre_hook(refuse)
    shard(model, mesh, mode="shard")
    with pytest.raises(RuntimeError, match="refused"):
        model(torch.ones(1, 2))
    assert isinstance(model[0].weight, DTensor)
    refusal.remove()
    assert model(torch.ones(1, 2)).shape == (1, 5)


def test_gathered_covers_all_of_the_sharding_and_ends_with_an_exception(mesh: DeviceMesh) -> None:
    model = Language()
    shard(model, mesh, mode="shard")
    with gathered(model.blocks[0]):
        assert not isinstance(model.blocks[0].up.weight, DTensor)
        assert not isinstance(model.head.weight, DTensor)
    with pytest.raises(KeyError), gathered(model):
        raise KeyError
    assert isinstance(model.blocks[0].up.weight, DTensor)


def test_inside_gathered_a_forward_of_a_nested_sharding_reads_what_was_read_before(
    mesh: DeviceMesh,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard(model[1], mesh, mode="shard", shard_dim=0, prefix="1")
    shard(model[0], mesh, mode="shard")
    shard(nn.Sequential(model, nn.Linear(4, 4)), mesh, mode="shard")
    seen: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(module.weight))
    with gathered(model[1]):
        weight = model[1].weight
        output = model[1](torch.ones(1, 4))
        assert seen[0] is weight
    assert torch.autograd.grad(output.sum(), [weight])[0].shape == (4, 4)


def test_nested_sharding_gathers_the_inner_model_in_either_forward(mesh: DeviceMesh) -> None:
    model = Mixture()
    shard(model.experts, mesh, mode="shard", shard_dim=2, prefix="experts")
    shard(model, mesh, mode="shard")
    assert model(TOKENS).shape == (2, 5, 13)
    assert model.experts(torch.ones(1, 1, 8)).shape == (1, 1, 8)
    with gathered(model):
        assert model.experts.up.shape == (2, 4, 8)
        assert not isinstance(model.experts.up, DTensor)
    assert isinstance(model.experts.up, DTensor)


def test_undo_restores_classes_hooks_and_tying(mesh: DeviceMesh) -> None:
    model = Language()
    before = {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}
    handle = shard(model, mesh, mode="shard")
    assert type(model.embedding) is not nn.Embedding
    assert isinstance(model.embedding, nn.Embedding)
    handle.undo()
    assert {n: (type(m), sorted(vars(m))) for n, m in model.named_modules()} == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert model.head.weight is model.embedding.weight
    assert type(model.head.weight) is nn.Parameter
    assert not isinstance(model.head.weight, DTensor)


def test_a_model_can_be_sharded_again_after_undo(mesh: DeviceMesh) -> None:
    model = Mixture()
    shard(model.experts, mesh, mode="shard", shard_dim=2)
    shard(model, mesh, mode="shard").undo()
    assert isinstance(model.experts.up, DTensor)
    shard(model, mesh, mode="replicate")
    assert model(TOKENS).shape == (2, 5, 13)


def test_a_deep_copy_runs_apart_from_the_original(mesh: DeviceMesh) -> None:
    model = Language()
    shard(model, mesh, mode="shard")
    copied = copy.deepcopy(model)
    assert type(copied.embedding) is type(model.embedding)
    assert copied.head.weight is copied.embedding.weight
    with gathered(copied):
        assert not isinstance(copied.head.weight, DTensor)
        assert isinstance(model.head.weight, DTensor)
    model.embedding.weight.to_local().detach().zero_()
    assert copied.embedding.weight.to_local().abs().sum() > 0


def test_a_meta_model_is_materialized_and_initialized_as_usual(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Language(tied=False)
    shard(model, mesh, mode="shard")
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            module.reset_parameters()
    for parameter in model.parameters():
        assert parameter.to_local().device.type == "cpu"
    assert torch.equal(model.blocks[0].norm.weight.to_local(), torch.ones(2))


def test_weights_can_be_tied_by_assignment_after_sharding(mesh: DeviceMesh) -> None:
    model = Language(tied=False)
    shard(model, mesh, mode="shard")
    model.embedding.weight = model.head.weight
    assert model.embedding.weight is model.head.weight
    with gathered(model):
        assert model.embedding.weight is model.head.weight
    gradients = torch.autograd.grad(model(TOKENS).sum(), list(model.parameters()))
    assert all(isinstance(gradient, DTensor) for gradient in gradients)


def test_gradients_and_optimizer_state_are_sharded_alike(mesh: DeviceMesh) -> None:
    model = Language()
    shard(model, mesh, mode="shard")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(TOKENS).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements
        assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements


def test_names_order_and_state_dict_are_those_of_the_unsharded_model(mesh: DeviceMesh) -> None:
    model, plain = Language(), Language()
    shard(model, mesh, mode="shard")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes


def test_modules_of_one_class_share_one_generated_class(mesh: DeviceMesh) -> None:
    model = nn.ModuleList([Experts(2, 4), Experts(2, 4)])
    shard(model, mesh, mode="shard")
    assert type(model[0]) is type(model[1])
    assert type(model[0]).__name__ == "ShardedExperts"


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def test_tensor_parallel_parameter_that_no_reader_differentiates_has_zeros() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                DTensor.from_local(torch.ones(4, 2), world["model"], [Shard(0)], run_check=False)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = _WithoutGradient.apply(x, self.weight)
            return result

    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = Reader()
    shard(model, world["data"], mode="replicate")
    model(torch.ones(3, requires_grad=True)).sum().backward()
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.placements == model.weight.placements
    assert torch.equal(model.weight.grad.to_local(), torch.zeros(4, 2))
