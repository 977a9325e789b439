"""Parameters that stand on several stages and are one: tied embeddings, mostly.

Each stage accumulates the gradient of its own copy. The gradient of the shared parameter is their
sum, in the order in which `SharedGroup.names` lists them and, for a name that stands on several
stages, by stage. That order is the same on every rank and for every schedule, so copies stay
equal to the bit; it differs from a tied model in one process in that there the uses are summed
within each microbatch, and microbatches then.

The sum is taken from an all-gather, not an all-reduce, whose order is the backend's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gt_pipeline.errors import RunnerSetupError
from gt_pipeline.runner.process_groups import make_group, release_group
from gt_pipeline.split import SharedGroup

_Gradients: TypeAlias = dict[str, Tensor]


class HoldsParameters(Protocol):
    """A stage, as far as its parameters go: whoever runs it, they can be shared."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Parameters by their name in the unsplit model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMember:
    """One copy of a shared parameter."""

    name: str
    stage: int
    rank: int
    """Global rank that holds the stage."""


def find_members(
    groups: Sequence[SharedGroup],
    names_of_stage: Mapping[int, Sequence[str]],
    rank_of_stage: Mapping[int, int],
) -> list[tuple[SharedMember, ...]]:
    """Where the copies of declared groups are, each group's in the order of summation.

    Raises:
        RunnerSetupError: a group names what no stage holds.
    """
    held = {name for names in names_of_stage.values() for name in names}
    problems = [
        f"shared group {group.names}: no stage has a parameter {name!r}"
        for group in groups
        for name in group.names
        if name not in held
    ]
    if problems:
        raise RunnerSetupError(what="this pipeline cannot run", problems=problems)
    return [
        tuple(
            SharedMember(name=name, stage=stage, rank=rank_of_stage[stage])
            for name in group.names
            for stage in sorted(names_of_stage)
            if name in names_of_stage[stage]
        )
        for group in groups
    ]


def shared_parameters(
    members_of_groups: Sequence[tuple[SharedMember, ...]],
    stages: Mapping[int, HoldsParameters],
    *,
    rank: int,
    timeout: timedelta | None = None,
) -> tuple[SharedParameter, ...]:
    """The shared parameters that this rank, of its global number, holds copies of.

    Every rank of the world calls it, with the members of all pipelines' groups, alike on all ranks.
    """
    shared = []
    for members in members_of_groups:
        ranks = sorted({member.rank for member in members})
        process_group = None
        if len(ranks) > 1:
            purpose = f"pipeline gradients of {members[0].name}"
            process_group = make_group(ranks, purpose=purpose, timeout=timeout)
        if rank in ranks:
            shared.append(SharedParameter(members, stages, process_group))
    return tuple(shared)


class SharedParameter:
    """One shared parameter, as a rank that holds copies of it sees it.

    Its members are all copies, in the order of summation; its process group is of the ranks that
    hold them, None if this rank alone does.
    """

    def __init__(
        self,
        members: Sequence[SharedMember],
        stages: Mapping[int, HoldsParameters],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.members = tuple(members)
        self.process_group = process_group
        self._stages = stages
        self._ranks = [] if process_group is None else dist.get_process_group_ranks(process_group)

    def sum_gradients(self, gradients: Mapping[int, _Gradients]) -> None:
        """Replace the gradient of each copy by the sum over all copies.

        Args:
            gradients: of this rank's stages, by index, then name. A copy without gradient counts
                as zero. Copies that are one `Parameter` object get the sum once.
        """
        mine = [
            _plain(self._gradient(member, gradients))
            for member in self.members
            if member.stage in self._stages
        ]
        by_member = iter(self._gathered(mine))
        total = next(by_member).clone()
        for each in by_member:
            total += each
        given: set[int] = set()
        for member in self.members:
            if member.stage not in self._stages:
                continue
            parameter = self._stages[member.stage].parameters()[member.name]
            if id(parameter) in given:
                gradients[member.stage].pop(member.name, None)
                continue
            given.add(id(parameter))
            into = torch.empty_like(parameter, requires_grad=False)
            _plain(into).copy_(total)
            gradients[member.stage][member.name] = into

    def synchronize(self) -> None:
        """Copy the first member's values to all others."""
        with torch.no_grad():
            first = self.members[0]
            mine = [
                _plain(self._stages[member.stage].parameters()[member.name])
                for member in self.members
                if member.stage in self._stages
            ]
            value = mine[0].clone() if first.stage in self._stages else torch.empty_like(mine[0])
            if self.process_group is not None:
                dist.broadcast(value, first.rank, group=self.process_group)
            for each in mine:
                each.copy_(value)

    def release(self) -> None:
        """Give the process group back to torch.distributed."""
        if self.process_group is not None:
            release_group(self.process_group)

    def _gradient(self, member: SharedMember, gradients: Mapping[int, _Gradients]) -> Tensor:
        gradient = gradients[member.stage].get(member.name)
        if gradient is not None:
            return gradient
        parameter = self._stages[member.stage].parameters()[member.name]
        return torch.zeros_like(parameter, requires_grad=False)

    def _gathered(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of all members, in their order."""
        if self.process_group is None:
            return list(mine)
        # Ranks hold different numbers of copies; each gathers as many as the largest number.
        num_rounds = max(Counter(member.rank for member in self.members).values())
        rounds = []
        for index in range(num_rounds):
            local = mine[index] if index < len(mine) else torch.zeros_like(mine[0])
            received = [torch.empty_like(local) for _ in self._ranks]
            dist.all_gather(received, local.contiguous(), group=self.process_group)
            rounds.append(received)
        by_rank = zip(self._ranks, zip(*rounds, strict=True), strict=True)
        of_rank = {rank: iter(copies) for rank, copies in by_rank}
        return [next(of_rank[member.rank]) for member in self.members]


def _plain(tensor: Tensor) -> Tensor:
    """The local part of a DTensor; any other tensor as it is. Copies have the same layout."""
    to_local = getattr(tensor, "to_local", None)
    with torch.no_grad():
        return tensor.detach() if to_local is None else to_local().detach()
