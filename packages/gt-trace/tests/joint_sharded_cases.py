"""What gloo workers do with joint graphs of sharded models. Each returns plain findings."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from fsdp_cases import Cell, batch, build, local, mesh_of, shard_ours, train
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from gt_trace.artifacts.joint_document import JOINT_FORM
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.joint import ForwardBackward, export_joint_graph, partition


class Captured:
    """A module whose forward runs as captured graphs, for code that trains modules.

    With ``axes`` they are stored and loaded first, those of rank 0 if ``of_rank_0``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        gradient_placements: dict[str, Any] | None = None,
        axes: MeshAxes | None = None,
        of_rank_0: bool = False,
        **choices: Any,
    ) -> None:
        self.module = module
        self.axes, self.of_rank_0 = axes, of_rank_0
        self.gradient_placements = gradient_placements
        self.choices = choices
        self.bound: Any = None
        self.parameters, self.named_parameters = module.parameters, module.named_parameters

    def __call__(self, *args: torch.Tensor) -> Any:
        if self.bound is None:
            joint = export_joint_graph(
                self.module, args, gradient_placements=self.gradient_placements
            )
            parts = partition(joint, **self.choices)
            if self.axes is not None:
                parts = stored_and_loaded(parts, self.axes, of_rank_0=self.of_rank_0)
            self.bound = parts.bind(self.module)
        return self.bound(*args)


def stored_and_loaded(
    parts: ForwardBackward, axes: MeshAxes, *, of_rank_0: bool
) -> ForwardBackward:
    """This rank's graphs through JSON, or those that rank 0 gives to all."""
    texts = [json.dumps(JOINT_FORM.encode(parts, axes).document)]
    if of_rank_0:
        dist.broadcast_object_list(texts, 0)
    return JOINT_FORM.decode(json.loads(texts[0]), axes, blob={}.__getitem__)


def differs_from_eager(
    cell: Cell, choices: dict[str, str], stored_by: str | None = None
) -> list[str]:
    """Losses, first gradients and parameters that differ in some bit after three steps of Adam.

    Args:
        cell: how the module is sharded.
        choices: of ``partition``.
        stored_by: whose graphs run as loaded: "this rank" or "rank 0"; None loads none.
    """
    modules = [build(cell), build(cell)]
    for module in modules:
        shard_ours(module, cell)
    eager = train(modules[0], cell, steps=3)
    axes = None if stored_by is None else MeshAxes.of_module(modules[1])
    replacement = Captured(modules[1], axes=axes, of_rank_0=stored_by == "rank 0", **choices)
    captured = train(replacement, cell, steps=3)
    differences = [] if eager.losses == captured.losses else ["losses"]
    if captured.placements != eager.placements:
        differences.append("placements")
    for kind in ("first_gradients", "parameters"):
        mine, theirs = getattr(captured, kind), getattr(eager, kind)
        differences += [f"{kind} {n}" for n in theirs if not torch.equal(mine[n], theirs[n])]
    return differences


def gradients_that_share_memory(cell: Cell) -> list[tuple[str, str]]:
    """Pairs of parameters whose gradients a later in-place scaling would both change."""
    module = build(cell)
    shard_ours(module, cell)
    Captured(module)(batch(cell, 0)[0]).sum().backward()
    owner: dict[int, str] = {}
    pairs = []
    for name, parameter in module.named_parameters():
        gradient = local(parameter.grad)
        if gradient.numel() == 0:
            continue
        other = owner.setdefault(gradient.untyped_storage().data_ptr(), name)
        if other != name:
            pairs.append((other, name))
    return pairs


class Body(nn.Module):
    """Tensor-parallel layers whose output is a DTensor, as a decoder's hidden states are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        mesh = mesh_of((dist.get_world_size(),), ("tp",))
        self.up = nn.Parameter(distribute_tensor(torch.rand(8, 4), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.rand(4, 8), mesh, [Shard(1)]))

    def forward(self, x: torch.Tensor) -> DTensor:
        whole = DTensor.from_local(x, self.up.device_mesh, [Replicate()], run_check=False)
        hidden = torch.sin(whole @ self.up.t())
        return (hidden @ self.down.t()).redistribute(placements=[Replicate()])


def gradients_behind_a_dtensor_output() -> list[str]:
    """What is not as expected of the gradients of a body whose head gives it a partial one.

    Told how the gradient arrives, the graphs are eager execution to the bit, placements included.
    Not told, they sum it before they multiply and not after, and agree up to rounding.
    """
    body, x = Body(), torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    head = distribute_tensor(torch.rand(6, 4), body.up.device_mesh, [Shard(0)])
    arrived: list[str] = []

    def gradients(call: Any) -> dict[str, DTensor]:
        hidden = call(x)
        assert hidden.placements == (Replicate(),)
        hidden.register_hook(lambda gradient: arrived.append(str(gradient.placements)))
        loss = (hidden @ head.t()).cos().sum().full_tensor()
        names, parameters = zip(*body.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    eager = gradients(body)
    told = gradients(Captured(body, gradient_placements={"output": [Partial()]}))
    untold = gradients(Captured(body))
    problems = [] if set(arrived) == {"(Partial(sum),)"} else [f"gradients arrived as {arrived}"]
    for name, expected in eager.items():
        if told[name].placements != expected.placements:
            problems.append(f"{name} is placed as {told[name].placements}")
        if not torch.equal(local(told[name]), local(expected)):
            problems.append(f"{name} differs")
        if not torch.allclose(untold[name].full_tensor(), expected.full_tensor(), atol=1e-6):
            problems.append(f"{name} differs when it is redistributed")
    return problems
