"""One training run, from a finished configuration to the last checkpoint."""

from __future__ import annotations

import torch

from gt_trainer.trainer import GraphTrainer


def train(config: GraphTrainer.Config) -> None:
    """Build the trainer, train, and close it also when training fails.

    Every rank of a run calls this, with the rendezvous in the environment (RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
    """
    trainer: GraphTrainer | None = None
    try:
        trainer = config.build()  # type: ignore[no-untyped-call]  # torchtitan leaves it unannotated
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
