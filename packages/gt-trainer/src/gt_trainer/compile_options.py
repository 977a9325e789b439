"""The ``--compile.*`` options of ``gt-train``: gt-config's, in the shape that torchtitan reads.

torchtitan 0.3.0's core asks its own ``CompileConfig`` for four things: ``enable``,
``components``, ``backend`` and ``enable_async_tensor_parallel`` (``trainer.py``,
``components/loss.py``, the models' ``parallelize.py``). They steer ``torch.compile``, which we
never use: the step is captured and compiled as a whole. So they are derived here, as constants,
and are no options.
"""

from __future__ import annotations

from dataclasses import dataclass

from gt_config import CompileConfig
from gt_config.option_paths import default_option, option_at, option_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCompileConfig(CompileConfig):
    """``gt_config.CompileConfig`` that also answers torchtitan's questions about torch.compile."""

    @property
    def enable(self) -> bool:
        """Whether torchtitan should call torch.compile: never."""
        return False

    @property
    def components(self) -> list[str]:
        """What torchtitan should call torch.compile on: nothing."""
        return []

    @property
    def backend(self) -> str:
        """The backend torchtitan would give to torch.compile: the one that compiles nothing."""
        return "eager"

    @property
    def enable_async_tensor_parallel(self) -> bool:
        """Whether torch.compile should pipeline tensor-parallel collectives: never."""
        return False


def chosen_options(options: CompileConfig) -> dict[str, object]:
    """The options that are not as they are by default, by their paths."""
    kind = type(options)
    values = {path: option_at(options, path) for path in option_paths(kind)}
    return {path: each for path, each in values.items() if each != default_option(kind, path)}
