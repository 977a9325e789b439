"""The models that are captured, on ranks that do not exist."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A published Llama 3 configuration on its intended world, of any depth."""

    config: str
    """Of ``gt_trainer.models.llama3``; the peer's is ``graph_trainer_<config>``."""

    world_size: int
    tensor_parallel_degree: int


WORKLOADS = {
    "8B": Workload(config="llama3_8b", world_size=64, tensor_parallel_degree=2),
    "405B": Workload(config="llama3_405b", world_size=1024, tensor_parallel_degree=8),
}
