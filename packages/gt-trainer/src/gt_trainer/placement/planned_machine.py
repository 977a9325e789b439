"""The machine that plans are priced for: the one that ``--hardware`` describes, or an H100 SXM.

torchtitan fixes the signature of what places a model, so that the machine comes by a context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from gt_passes import SymmetricMemoryOnPaper
from gt_passes.simulation import CostModel, Hardware, h100_sxm


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMachine:
    """A machine, and whether it is only told of."""

    hardware: Hardware | None = None
    """None for an H100 SXM."""

    is_simulated: bool = False
    """Whether a dry run asks, whose ranks have that machine's memory and not this one's."""

    def described(self) -> Hardware:
        """Its description."""
        return self.hardware or h100_sxm()

    def cost_model(self) -> CostModel:
        """Prices on it."""
        return CostModel(self.described())

    def symmetric_memory(self) -> SymmetricMemoryOnPaper:
        """Which of its GPUs read each other's memory."""
        return SymmetricMemoryOnPaper(gpus_per_node=self.described().gpus_per_node)


_MACHINE: ContextVar[PlannedMachine] = ContextVar("planned machine")


@contextmanager
def planned_for(machine: PlannedMachine) -> Iterator[None]:
    """Inside, plans are priced for ``machine``, and plans of files must have been."""
    token = _MACHINE.set(machine)
    try:
        yield
    finally:
        _MACHINE.reset(token)


def planned_machine() -> PlannedMachine:
    """The machine of ``planned_for``; else that of whoever runs, priced as an H100 SXM."""
    return _MACHINE.get(PlannedMachine())
