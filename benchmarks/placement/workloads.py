"""Models, meshes and requests whose planning is measured."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from gt_trainer import device

device.install("cpu")  # before the imports below, whose modules copy their device

import torch  # noqa: E402
from torchtitan.tools import utils as titan_utils  # noqa: E402

from gt_autoparallel import MeshShape, planner_of_model  # noqa: E402
from gt_autoparallel.planner import Planner, ReportProgress  # noqa: E402
from gt_trainer.decoder.attention import attention_mask_for  # noqa: E402
from gt_trainer.models import llama3  # noqa: E402

__all__ = ["WORKLOADS", "Workload"]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model on one mesh."""

    config: str
    """Name of a configuration in ``gt_trainer.models.llama3``."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    batch: int
    """Global."""

    seq_len: int
    memory_budget_gib: float | None = None
    relative_gap: float = 1e-3
    time_limit_seconds: float = 120.0
    asks_again: bool = False
    """Whether to ask once more with the inputs pinned, as a data loader gives them."""

    shares_of_memory: tuple[float, ...] = ()
    """Budgets to ask again with, of what the first plan takes. The first one that is less builds
    the problem in which values are computed again."""

    budgets_gib: tuple[float, ...] = ()
    """Budgets to ask again with."""

    larger_mesh: MeshShape | None = None
    """On which the same graph is planned within ``larger_budget_gib``, by a planner of its own."""

    larger_budget_gib: float = 0.0

    @property
    def memory_budget_bytes(self) -> int | None:
        """The budget as the planner takes it."""
        return None if self.memory_budget_gib is None else round(self.memory_budget_gib * _GIB)

    def planner(
        self, *, num_layers: int | None = None, progress: ReportProgress | None = None
    ) -> Planner:
        """Build the model on meta and capture it.

        Args:
            num_layers: None for all of them.
            progress: takes lines about what is done.
        """
        configuration: Any = getattr(llama3, self.config)()
        model_config = configuration.model_spec.model
        if num_layers is not None:
            published = model_config.layers
            model_config.layers = [
                copy.deepcopy(published[number % len(published)]) for number in range(num_layers)
            ]
        configuration.training.seq_len = self.seq_len
        model_config.update_from_config(config=configuration)
        with torch.device("meta"), titan_utils.set_default_dtype(torch.float32):
            model = model_config.build()
        shape = (self.batch, self.seq_len)
        tokens, positions = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
        mask = attention_mask_for(model, positions)
        return planner_of_model(
            model,
            MeshShape(names=self.axes, sizes=self.sizes),
            (tokens,),
            example_kwargs={"positions": positions, "attention_masks": mask},
            compute_dtype=torch.bfloat16,
            progress=progress,
        )


WORKLOADS = {
    "llama3_8b 8x8": Workload(
        config="llama3_8b",
        axes=("data", "model"),
        sizes=(8, 8),
        batch=16,
        seq_len=8192,
        asks_again=True,
        shares_of_memory=(1.1, 0.9, 0.7),
    ),
    "llama3_8b 64": Workload(
        config="llama3_8b", axes=("data",), sizes=(64,), batch=128, seq_len=8192
    ),
    "llama3_405b 8x4x2": Workload(
        config="llama3_405b",
        axes=("data", "sequence", "model"),
        sizes=(8, 4, 2),
        batch=16,
        seq_len=8192,
        relative_gap=0.01,
        budgets_gib=(118.0,),  # nine tenths of an H200's 141 GB
        larger_mesh=MeshShape(names=("data", "sequence", "model"), sizes=(16, 4, 2)),
        larger_budget_gib=72.0,
    ),
}
