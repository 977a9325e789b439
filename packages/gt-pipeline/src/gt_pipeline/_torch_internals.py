"""Every private PyTorch symbol of the parts that capture nothing, each with its reason.

A new PyTorch needs edits here and nowhere else. Checked against torch 2.13, 2.14 and 2.15, which
differ in this:

- 2.15 adds WAIT_SEND_F, WAIT_SEND_B and WAIT_REDUCE_GRAD actions to its tables. They say when
  PyTorch's runtime retires a transfer or a reduction that it started; ours have no such actions.
- 2.15 has no ``stage.fwd_cache`` any more. Nothing here reads what PyTorch's stages save: graph
  stages save their own values.
- Functions for actions are registered with ``register_custom_function`` in all three; in 2.15 it
  also takes WAIT_REDUCE_GRAD, which must do nothing where a function of ours reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    # The only type that all of PyTorch's schedules have in common; what they take as a stage; the
    # runtime that executes any list of actions; and what it tells the functions of actions.
    from torch.distributed.pipelining.schedules import (
        _Action,
        _PipelineContext,
        _PipelineSchedule,
        _PipelineScheduleRuntime,
    )
    from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = [
    "PipelineContext",
    "PipelineStageBase",
    "TorchSchedule",
    "TransferBackend",
    "backend_of",
    "force_backward",
    "prepare_runtime",
    "register_function",
    "runs_actions",
    "runs_backward",
    "torch_schedule",
    "torch_table",
]

# By name, since torch.distributed.pipelining imports torch._dynamo, which takes seconds: whoever
# only splits a model, or runs a schedule that is not PyTorch's, does not pay for it.
TorchSchedule: TypeAlias = "_PipelineSchedule"
PipelineScheduleRuntime: TypeAlias = "_PipelineScheduleRuntime"
PipelineStageBase: TypeAlias = "_PipelineStageBase"
PipelineContext: TypeAlias = "_PipelineContext"

# They have no counterpart among our actions; see the module's docstring. By value, since 2.13 and
# 2.14 do not know them.
_NOT_OURS = ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")


class TransferBackend(Protocol):
    """Methods of a process group's backend that torch's stubs do not have."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work:
        """Start to send a tensor."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work:
        """Start to fill a tensor with what the peer sends under a tag."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> TransferBackend:
    """What runs a group's transfers of tensors on a device.

    Public methods of a group take it there through the dispatcher, once a call: 5 of 18 us.
    """
    backend: TransferBackend = cast("Any", group)._get_backend(device)
    return backend


def torch_table(
    name: str, *, num_ranks: int, num_stages: int, num_microbatches: int
) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """The compute actions by rank, as text, and the rank of each stage, of a multi-stage schedule.

    PyTorch computes its tables in constructors that take stages. Of a stage they read nothing but
    sizes, so one that has only sizes is enough. The constructors go on to add communication, most
    of their work; here they do not.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    schedule_class = get_schedule_class(name)
    table_class = type(
        schedule_class.__name__,
        (schedule_class,),
        {"_prepare_schedule_with_comms": lambda self, actions: None},
    )
    stages = [
        SimpleNamespace(
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            submod=None,
            stage_index_to_group_rank={},
        )
        for _ in range(num_stages // num_ranks)
    ]
    schedule = cast("PipelineScheduleMulti", table_class(stages, n_microbatches=num_microbatches))
    table = tuple(
        tuple(
            str(action)
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type.value not in _NOT_OURS
        )
        for rank in range(num_ranks)
    )
    mapping = schedule.stage_index_to_group_rank
    return table, tuple(mapping[stage] for stage in range(num_stages))


def torch_schedule(name: str, stages: Sequence[PipelineStageBase], **options: Any) -> TorchSchedule:
    """PyTorch's schedule object of a name; single-stage schedules take no autograd option."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    schedule_class = get_schedule_class(name)
    if issubclass(schedule_class, PipelineScheduleSingle):
        return cast("TorchSchedule", schedule_class(stages[0], **options))
    return cast("TorchSchedule", schedule_class(list(stages), **options))


def prepare_runtime(
    stages: Sequence[PipelineStageBase], table: Sequence[Sequence[str]], **options: Any
) -> PipelineScheduleRuntime:
    """PyTorch's runtime over compute actions of ours, given as text by rank."""
    # What a CSV schedule, and a single-stage schedule of graph stages, need has no public name.
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(list(stages), **options)  # type: ignore[no-untyped-call] # its __init__ has no annotations
    actions: dict[int, list[_Action | None]] = {
        rank: [_Action.from_str(text) for text in row] for rank, row in enumerate(table)
    }
    runtime.pipeline_order = actions
    runtime._prepare_schedule_with_comms({rank: list(row) for rank, row in actions.items()})
    return runtime


def force_backward(schedule: TorchSchedule) -> None:
    """Let a schedule without a loss function run its backward actions.

    The constructor sets this flag from the loss function alone, and offers no argument for it.
    ``eval`` sets it aside and puts it back.
    """
    schedule._has_backward = True


def runs_actions(schedule: TorchSchedule) -> bool:
    """Whether it is PyTorch's runtime over a list of actions, and not code for one schedule."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    return isinstance(schedule, _PipelineScheduleRuntime)


def runs_backward(schedule: TorchSchedule) -> bool:
    """Whether backward actions of the step in progress are to run; not in ``eval``."""
    return bool(schedule._has_backward)


def register_function(
    schedule: TorchSchedule,
    kind: str,
    function: Callable[[str, PipelineContext], None],
) -> None:
    """Have a function of an action's text run all actions of a kind, in PyTorch's runtime."""
    from torch.distributed.pipelining.schedules import _ComputationType

    def run(action: _Action, ctx: PipelineContext) -> None:
        function(str(action), ctx)

    runtime = cast("PipelineScheduleRuntime", schedule)
    runtime.register_custom_function(_ComputationType.from_str(kind), run)
