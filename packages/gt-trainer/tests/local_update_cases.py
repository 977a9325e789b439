"""Updates on four ranks, ours beside torchtitan's. Workers import this module by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Adam, AdamW, Optimizer
from torchtitan.distributed import utils as dist_utils

from gt_trainer.local_update import clip_gradients, on_local_parts

NUM_STEPS = 3

# The second has no rows for one rank, the last lies on a mesh of experts.
_LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, Any], bool]] = [
    ((7, 6), (Shard(1), Shard(0)), False),
    ((1, 5), (Shard(0), Replicate()), False),
    ((8,), (Shard(0), Replicate()), False),
    ((3, 4), (Replicate(), Replicate()), False),
    ((4, 5, 3), (Shard(1), Shard(0)), True),
]


class OwnAdam(Adam):
    """An optimizer that may do anything."""


def parameters(*, with_experts: bool) -> list[nn.Parameter]:
    """Equal on every call; the last gets no gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape, placements, is_expert in _LAYOUTS:
        if is_expert and not with_experts:
            continue
        value = torch.randn(shape, generator=generator)
        placed = distribute_tensor(value, experts if is_expert else mesh, placements)
        made.append(nn.Parameter(placed))
    made.append(nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()])))
    return made


def _give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for each in parameters[:-1]:
        assert isinstance(each, DTensor)
        value = torch.randn(each.shape, generator=generator)
        each.grad = distribute_tensor(value, each.device_mesh, each.placements)


def differences(
    make: Callable[..., Optimizer], options: dict[str, Any], with_experts: bool
) -> list[str]:
    """What three updates of ours have otherwise than torchtitan's, bit for bit; and where."""
    found = []
    ours, theirs = (parameters(with_experts=with_experts) for _ in range(2))
    own, other = (make([{"params": each}], lr=0.1, **options) for each in (ours, theirs))
    for step in range(NUM_STEPS):
        _give_gradients(ours, step)
        _give_gradients(theirs, step)
        norm = clip_gradients(ours, 1.0, second_copies=[], pp_mesh=None, ep_enabled=with_experts)
        expected = dist_utils.clip_grad_norm_(theirs, 1.0, foreach=True, ep_enabled=with_experts)
        if not torch.equal(norm, expected):
            found.append(f"step {step}: norm {norm} is not {expected}")
        with on_local_parts([own]):
            own.step()
        other.step()
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            pairs = [("parameter", a, b), ("gradient", a.grad, b.grad)]
            if list(own.state.get(a, {})) != list(other.state.get(b, {})):
                found.append(f"step {step}, {number}: state {list(own.state.get(a, {}))}")
            pairs += [(k, own.state[a][k], v) for k, v in other.state.get(b, {}).items()]
            found += [
                f"step {step}, {number}: {what} differs"
                for what, mine, yours in pairs
                if not _equal(mine, yours)
            ]
    return found


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None or not isinstance(other, DTensor):
        return type(one) is type(other) and (one is None or torch.equal(one, other))
    return (
        isinstance(one, DTensor)
        and one.placements == other.placements
        and (one.shape, one.stride()) == (other.shape, other.stride())
        and torch.equal(one.to_local(), other.to_local())
    )


def what_steps_are_given() -> dict[str, tuple[bool, bool]]:
    """For each optimizer, whether it steps on plain tensors, and holds its own afterwards.

    One has a gradient that is placed otherwise than its parameter; the last lets PyTorch choose
    how it runs.
    """
    seen = {}
    kinds = [("Adam", Adam), ("AdamW", AdamW), ("OwnAdam", OwnAdam), ("moved", Adam)]
    for name, make in [*kinds, ("not said", Adam)]:
        held = parameters(with_experts=False)
        optimizer = make(held, foreach=None if name == "not said" else True)
        _give_gradients(held, 0)
        if name == "moved":
            first: Any = held[0]
            object.__setattr__(first, "grad", first.grad.redistribute(placements=[Replicate()] * 2))
        with on_local_parts([optimizer]):
            given = optimizer.param_groups[0]["params"]
            is_plain = not any(isinstance(each, DTensor) for each in given[:-1])
        kept = optimizer.param_groups[0]["params"]
        seen[name] = (is_plain, all(a is b for a, b in zip(kept, held, strict=True)))
    return seen


def clipped_elsewhere() -> bool:
    """Whether a gradient that is cut where its parameter is whole is clipped as torchtitan does."""
    norms, clipped = [], []
    for clip in (clip_gradients, dist_utils.clip_grad_norm_):
        first: Any = parameters(with_experts=False)[3]
        cut = distribute_tensor(torch.ones(3, 4), first.device_mesh, [Shard(1), Shard(0)])
        object.__setattr__(first, "grad", cut)
        if clip is clip_gradients:
            norms.append(clip([first], 1.0, second_copies=[], pp_mesh=None, ep_enabled=False))
        else:
            norms.append(clip([first], 1.0, foreach=True, ep_enabled=False))
        clipped.append(first.grad)
    return torch.equal(*norms) and _equal(*clipped) and norms[0].item() > 1


def state_after_failure() -> bool:
    """Whether an optimizer whose step fails holds its own parameters and state again."""
    held = parameters(with_experts=False)
    optimizer = AdamW(held, foreach=True)
    state = optimizer.state
    _give_gradients(held, 0)
    try:
        with on_local_parts([optimizer]):
            raise ArithmeticError
    except ArithmeticError:
        return optimizer.state is state and optimizer.param_groups[0]["params"][0] is held[0]
