"""Tensor subclasses come apart into plain leaves and go together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gt_trace import StateMismatchError, flatten_tensor, trace_step, unflatten_tensor
from gt_trace.testing import fake_world


class Scaled(torch.Tensor):
    """A value with a scale beside it: a subclass of two leaves that torch knows nothing of."""

    @staticmethod
    def __new__(cls, value: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)

    def __init__(self, value: torch.Tensor, scale: torch.Tensor) -> None:
        self.value = value
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["value", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> Scaled:
        return Scaled(inner["value"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.value * a.scale if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_subclass_argument_enters_the_graph_as_its_leaves() -> None:
    x = Scaled(torch.ones(3), torch.tensor(2.0))
    traced = trace_step(lambda x, y: x + y)(x, torch.ones(3))
    assert [(i.name, i.leaf) for i in traced.inputs] == [("x", 0), ("x", 1), ("y", 0)]
    other = Scaled(torch.full((3,), 5.0), torch.tensor(3.0))
    assert torch.equal(traced.bind()(other, torch.ones(3)), torch.full((3,), 16.0))


def test_nested_subclass_round_trips() -> None:
    inner = Scaled(torch.ones(3), torch.tensor(2.0))
    leaves, layout = flatten_tensor(Scaled(inner, torch.tensor(4.0)))
    assert [leaf.numel() for leaf in leaves] == [3, 1, 1]
    again = unflatten_tensor(leaves, layout)
    assert isinstance(again, Scaled)
    assert isinstance(again.value, Scaled)
    assert again.scale is leaves[2]


def test_subclass_output_comes_back_as_the_subclass() -> None:
    bound = trace_step(lambda x: Scaled(x + 1, x.sum()))(torch.ones(2)).bind()
    result = bound(torch.full((2,), 3.0))
    assert isinstance(result, Scaled)
    assert torch.equal(result.value, torch.full((2,), 4.0))
    assert torch.equal(result.scale, torch.tensor(6.0))


def test_dtensor_parameter_and_its_gradient_keep_their_placement() -> None:
    with fake_world(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = nn.Linear(4, 6, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))

        def step(x: torch.Tensor) -> Any:
            loss = layer(DTensor.from_local(x, mesh, [Replicate()])).to_local().sum()
            return torch.autograd.grad(loss, [layer.weight])

        traced = trace_step(step, module=layer)(torch.ones(2, 4))
        assert [tuple(t.shape) for t in traced.example_inputs] == [(3, 4), (2, 4)]
        assert all(type(n.meta["val"]).__name__ == "FakeTensor" for n in _placeholders(traced))
        (gradient,) = traced.bind(layer)(torch.ones(2, 4))
        assert isinstance(gradient, DTensor)
        assert gradient.placements == (Shard(0),)
        assert gradient.shape == (6, 4)
        assert torch.equal(gradient.to_local(), torch.full((3, 4), 2.0))


def test_binding_to_another_placement_is_an_error() -> None:
    with fake_world(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def layer_of(placement: Shard | Replicate) -> nn.Module:
            layer = nn.Linear(4, 4, bias=False)
            sharded = distribute_tensor(layer.weight.detach(), mesh, [placement])
            layer.weight = nn.Parameter(sharded)
            return layer

        traced = trace_step(lambda x: x, module=layer_of(Shard(0)))(torch.ones(1))
        with pytest.raises(StateMismatchError, match=r"weight: DTensor\[4, 4\] with .*Replicate"):
            traced.bind(layer_of(Replicate()))


def _placeholders(traced: Any) -> list[Any]:
    return list(traced.graph_module.graph.find_nodes(op="placeholder"))
