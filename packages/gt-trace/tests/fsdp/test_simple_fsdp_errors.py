"""What cannot be sharded, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gt_trace.fsdp import ShardingError, gathered, shard
from gt_trace.testing import fake_world


@pytest.fixture(autouse=True)
def root() -> Iterator[DeviceMesh]:
    with fake_world(rank=0, world_size=4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ShardingError) as error:
        call()
    return str(error.value)


def placed(mesh: DeviceMesh, shape: tuple[int, ...], placement: Any) -> nn.Parameter:
    """A parameter whose local part on ``mesh`` has that shape."""
    return nn.Parameter(DTensor.from_local(torch.ones(shape), mesh, [placement], run_check=False))


def test_unknown_mode(root: DeviceMesh) -> None:
    mode: Any = "fsdp"
    assert refusal(lambda: shard(nn.Linear(2, 2), root["dp"], mode=mode)) == (
        "the model cannot be sharded:\n"
        "  mode is 'fsdp'; allowed: 'replicate', 'shard', 'hybrid_shard'"
    )


def test_mesh_of_the_wrong_rank_and_without_names() -> None:
    mesh = init_device_mesh("cpu", (4,))
    assert refusal(lambda: shard(nn.Linear(2, 2), mesh, mode="hybrid_shard")) == (
        "the model cannot be sharded:\n"
        "  mode 'hybrid_shard' needs a mesh of 2 axes, and this one has 1\n"
        "  the mesh has no axis names; give mesh_dim_names="
    )


def test_two_axes_where_one_is_wanted(root: DeviceMesh) -> None:
    assert refusal(lambda: shard(nn.Linear(2, 2), root, mode="shard")) == (
        "the model cannot be sharded:\n  mode 'shard' needs a mesh of 1 axes, and this one has 2"
    )


def test_nothing_to_shard(root: DeviceMesh) -> None:
    expected = (
        "the model cannot be sharded:\n"
        "  no parameter is left to shard: the model has none, or all are sharded already"
    )
    assert refusal(lambda: shard(nn.ReLU(), root["dp"], mode="shard")) == expected
    model = nn.Linear(2, 2)
    shard(model, root["dp"], mode="shard")
    assert refusal(lambda: shard(model, root["dp"], mode="shard")) == expected


def test_every_unfit_parameter_is_listed_at_once(root: DeviceMesh) -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.ones(0, 4))
    model.scalar = nn.Parameter(torch.ones(()))
    model.partial = placed(root["tp"], (4, 4), Partial())
    model.odd = placed(root["tp"], (3, 4), Shard(0))
    model.fine = placed(root["tp"], (3, 4), Replicate())
    model.foreign = placed(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), (4, 4), Shard(1))
    model.overlapping = placed(root["dp"], (4, 4), Replicate())
    assert refusal(lambda: shard(model, root["dp"], mode="shard", prefix="layers.0")) == (
        "the model cannot be sharded:\n"
        "  layers.0.empty has no elements\n"
        "  layers.0.scalar has 0 dimensions, and shard_dim is 0\n"
        "  layers.0.partial is placed as [Partial(sum)] already; allowed: Shard, Replicate\n"
        "  layers.0.odd has extent 6 in dim 0, which its own mesh splits by 2; it does not divide "
        "by 2 x 2\n"
        "  layers.0.foreign is placed on the mesh axes ('x',), which overlap the data-parallel axes "
        "('dp',) or have another root mesh\n"
        "  layers.0.overlapping is placed on the mesh axes ('dp',), which overlap the data-parallel "
        "axes ('dp',) or have another root mesh"
    )


def test_shard_dim_beyond_a_bias(root: DeviceMesh) -> None:
    assert refusal(lambda: shard(nn.Linear(2, 2), root["dp"], mode="shard", shard_dim=1)) == (
        "the model cannot be sharded:\n  bias has 1 dimensions, and shard_dim is 1"
    )


@pytest.mark.parametrize("tied", ["before", "after"])
def test_weight_tied_across_two_calls(root: DeviceMesh, tied: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    if tied == "before":
        model["b"].weight = model["a"].weight
    shard(model["a"], root["dp"], mode="shard", prefix="a")
    if tied == "after":
        model["b"].weight = model["a"].weight
    assert refusal(lambda: shard(model, root["dp"], mode="shard")) == (
        "the model cannot be sharded:\n"
        "  b.weight is tied to a.weight, which is sharded already; shard them in one call"
    )


def test_parameter_added_after_sharding(root: DeviceMesh) -> None:
    model = nn.Linear(2, 2, bias=False)
    shard(model, root["dp"], mode="shard")
    model.extra = nn.Parameter(torch.ones(2))
    assert refusal(lambda: shard(model, root["dp"], mode="shard")) == (
        "the model cannot be sharded:\n"
        "  extra was added to a module that is sharded already; undo that sharding first"
    )


def test_parameter_replaced_by_one_of_another_placement(root: DeviceMesh) -> None:
    model = nn.Linear(2, 2, bias=False)
    shard(model, root["dp"], mode="shard", prefix="head")
    model.weight = nn.Parameter(torch.ones(2, 2))
    with gathered(model):
        assert refusal(lambda: model.weight) == (
            "head.weight was replaced after sharding by a parameter that is no DTensor; it must "
            "be a DTensor placed as (Shard(dim=0),), as the sharded one was"
        )
    model.weight = placed(root["dp"], (2, 2), Replicate())
    assert refusal(lambda: model(torch.ones(1, 2))) == (
        "head.weight was replaced after sharding by a parameter that is placed as "
        "(Replicate(),); it must be a DTensor placed as (Shard(dim=0),), as the sharded one was"
    )


def test_refusal_changes_nothing(root: DeviceMesh) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    refusal(lambda: shard(model, root["dp"], mode="shard", shard_dim=1))
    assert type(model) is nn.Linear
    assert model.weight is weight
    assert not model._forward_hooks
