"""What stands between launch and wait of each collective of a step; workers import it by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from runner_cases import graph_stages
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from toy_pipeline import MICROBATCH_SIZE, batch

from gt_pipeline.runner import GraphPPRunner
from gt_pipeline.schedules import Schedule, schedule_of
from gt_pipeline.schedules.actions import parse_action
from gt_trace.fsdp import shard

_COMPUTE = ("mm", "addmm", "bmm")


class _Log(TorchDispatchMode):
    """Every launch, wait and matrix product, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0
        self.launched: dict[int, tuple[str, int]] = {}
        self.hidden_behind: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace != "_c10d_functional":
            self.num_products += name in _COMPUTE
        elif name != "wait_tensor":
            results = result if isinstance(result, list) else [result]
            for each in results:
                self.launched[each.data_ptr()] = (name, self.num_products)
        else:
            name, products_before = self.launched.pop(args[0].data_ptr())
            self.hidden_behind.append((name, self.num_products - products_before))
        return result


def log_named(name: str) -> tuple[list[tuple[str, bool]], int]:
    """``_run`` of a schedule over two pipeline ranks and two shards."""
    planned = schedule_of(name, num_ranks=2, num_stages=4, num_microbatches=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    return _run(planned, lambda module: shard(module, mesh["shard"], mode="shard"), mesh)


def log_replicas() -> tuple[list[tuple[str, bool]], int]:
    """``_run`` of two stages that take turns late, over two replicas of two shards."""
    lists = ["0F0", "1F0", "0F1", "1F1", "1B0", "1B1", "0B0", "0B1"]
    planned = Schedule(
        name="two phases",
        stage_to_rank=(0, 0),
        num_microbatches=2,
        compute=(tuple(map(parse_action, lists)),),
    )
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipeline", "replicate", "shard"))
    both = mesh["replicate", "shard"]
    return _run(planned, lambda module: shard(module, both, mode="hybrid_shard"), mesh)


def gathers_within(stages_at_once: int) -> tuple[list[int], int]:
    """Gathers of a step that may hold no more bytes than that many of this rank's stages.

    Returns:
        The bytes of this rank's stages, and how often a parameter was gathered.
    """
    planned = schedule_of("Interleaved1F1B", num_ranks=2, num_stages=4, num_microbatches=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    stages = graph_stages(
        planned,
        mesh["pipeline"].get_local_rank(),
        place=lambda module: shard(module, mesh["shard"], mode="shard"),
    )
    sizes = [stage.unsharded_bytes for stage in stages]
    most = max(sizes) if stages_at_once == 1 else sum(sizes)
    tokens, target = (each[: planned.num_microbatches * MICROBATCH_SIZE] for each in batch())
    group = mesh["pipeline"].get_group()
    with (
        GraphPPRunner(stages, planned, group=group, max_unsharded_bytes=most) as runner,
        _Log() as log,
    ):
        runner.step(tokens, target=target)
    assert not log.launched
    return sizes, sum(kind == "all_gather_into_tensor" for kind, _ in log.hidden_behind)


def _run(
    planned: Schedule, place: Callable[[nn.Module], object], mesh: DeviceMesh
) -> tuple[list[tuple[str, bool]], int]:
    """One step.

    Returns:
        Kinds of collectives in the order of their waits, with whether anything was computed between
        launch and wait; what lies side by side once. And how many nothing ever waited for.
    """
    stages = graph_stages(planned, mesh["pipeline"].get_local_rank(), place=place)
    tokens, target = (each[: planned.num_microbatches * MICROBATCH_SIZE] for each in batch())
    with GraphPPRunner(stages, planned, group=mesh["pipeline"].get_group()) as runner:
        runner.step(tokens, target=target)
        with _Log() as log:
            runner.step(tokens, target=target)
    kinds = ((kind, products > 0) for kind, products in log.hidden_behind)
    return [kind for kind, _ in itertools.groupby(kinds)], len(log.launched)
