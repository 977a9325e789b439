"""A torchtitan user's own trainer, with one line changed.

::

    pip install ./packages/gt-config ./packages/gt-trace ./packages/gt-passes
    pip install ./packages/gt-pipeline ./packages/gt-autoparallel ./packages/gt-trainer
    gt-train --nproc 2 --module examples.torchtitan_trainer --config counting \
        --parallelism.data_parallel_shard_degree 2 \
        --hf_assets_path packages/gt-trainer/src/gt_trainer/data/tokenizer

The trainer keeps an average of the weights, its data are its own, and its configuration is one for
torchtitan. What changed is the import of ``Trainer``; what was ``torchrun -m torchtitan.train`` is
``gt-train``, with the same flags. ``--compile.mode none`` runs the same training eagerly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import DebugConfig, TrainingConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import logger

# [start: trainer]
from gt_trainer.trainer import (
    GraphTrainer as Trainer,
)  # was: from torchtitan.trainer import Trainer


class AveragingTrainer(Trainer):
    """Keeps an exponential moving average of the parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, and how much of the average stays in each step."""

        decay: float = 0.9

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.decay = config.decay
        self.average = [each.detach().clone() for each in self._parameters()]

    def train_step(self, data_iterator: Any) -> None:
        """One update, of the parameters and of their average."""
        super().train_step(data_iterator)
        with torch.no_grad():
            for average, parameter in zip(self.average, self._parameters(), strict=True):
                average.lerp_(parameter, 1 - self.decay)

    def close(self) -> None:
        """Say how far the average is from the last parameters."""
        pairs = zip(self.average, self._parameters(), strict=True)
        distance = sum(float((a - b).square().sum().detach()) for a, b in pairs) ** 0.5
        logger.info(f"The parameters are {distance:.4f} from their average")
        super().close()

    def _parameters(self) -> list[Tensor]:
        return [each for part in self.model_parts for each in part.parameters()]


# [end: trainer]


class CountingDataLoader(ParallelAwareDataloader):
    """Sequences that count up from somewhere: ({"input", "positions"}, labels), each (B, L)."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing of its own."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **other: Any,
    ) -> None:
        batches = Counting(dp_rank, seq_len=seq_len, batch_size=local_batch_size)
        super().__init__(batches, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=None)


class Counting(IterableDataset):
    """The batches of one rank, without end."""

    def __init__(self, rank: int, *, seq_len: int, batch_size: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.seq_len, self.batch_size = seq_len, batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        positions = torch.arange(self.seq_len).expand(self.batch_size, -1)
        while True:
            first = torch.randint(0, 512, (self.batch_size, 1), generator=self.generator)
            tokens = (first + torch.arange(self.seq_len + 1)) % 512
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]


def counting() -> Trainer.Config:
    """Llama 3 in miniature, on numbers."""
    model_spec = model_registry("debugmodel")
    return AveragingTrainer.Config(
        model_spec=model_spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=4, seq_len=64, steps=5, mixed_precision_param="float32"
        ),
        dataloader=CountingDataLoader.Config(),
        debug=DebugConfig(seed=0),
    )
