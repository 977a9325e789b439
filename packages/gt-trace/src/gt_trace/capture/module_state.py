"""The tensors that a training step reads besides its arguments, and how to swap them.

Parameters, buffers and optimizer state become inputs of the captured graph. While a trace runs,
the live objects hold the traced tensors instead of their own; afterwards they are as before, also
when the trace failed.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gt_trace.errors import CaptureError

StateKind = Literal["parameter", "buffer", "optimizer_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor of the state, with every name that leads to it.

    Tied parameters are one entry with several names, hence one input of the graph.
    """

    kind: StateKind
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlot:
    """Where a tensor of the state lives: one or more (dictionary, key) places."""

    entry: StateEntry
    tensor: torch.Tensor
    places: tuple[tuple[MutableMapping[Any, Any], Any], ...]

    def put(self, tensor: torch.Tensor) -> None:
        """Let every place hold ``tensor``."""
        for holder, key in self.places:
            holder[key] = tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether every place still holds this very object."""
        return all(holder.get(key) is tensor for holder, key in self.places)

    def contents(self) -> tuple[torch.Tensor | None, ...]:
        """What each place holds now."""
        return tuple(holder.get(key) for holder, key in self.places)


def collect_state(
    module: nn.Module | None, optimizer: torch.optim.Optimizer | None = None
) -> list[StateSlot]:
    """Parameters, then buffers, then optimizer state, each distinct tensor once.

    The order is that of ``named_modules``; equal modules give equal orders on every rank.

    Raises:
        CaptureError: an optimizer without its module, or one whose parameters are not the
            module's, or one that has no state yet although its kind keeps state.
    """
    if module is None:
        if optimizer is not None:
            raise CaptureError(
                "an optimizer was given without its module; pass module= too, so that its "
                "parameters can be named"
            )
        return []
    slots = [*_tensors(module, "parameter"), *_tensors(module, "buffer")]
    if optimizer is not None:
        slots.extend(_optimizer_state(optimizer, slots))
    return slots


def _tensors(module: nn.Module, kind: Literal["parameter", "buffer"]) -> list[StateSlot]:
    found: dict[int, tuple[torch.Tensor, list[str], list[tuple[dict[str, Any], str]]]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        # The dictionaries, not getattr: a sharded module's attribute gathers the parameter.
        holder: dict[str, Any] = owner._parameters if kind == "parameter" else owner._buffers
        for key, tensor in holder.items():
            if tensor is None:
                continue
            _, names, places = found.setdefault(id(tensor), (tensor, [], []))
            names.append(f"{prefix}.{key}" if prefix else key)
            if not any(known is holder and at == key for known, at in places):
                places.append((holder, key))
    return [
        StateSlot(
            entry=StateEntry(kind=kind, names=tuple(names)), tensor=tensor, places=tuple(places)
        )
        for tensor, names, places in found.values()
    ]


def _optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[StateSlot]
) -> list[StateSlot]:
    name_of = {id(slot.tensor): slot.entry.name for slot in parameters}
    foreign = 0
    slots: list[StateSlot] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = name_of.get(id(parameter))
            if name is None:
                foreign += 1
                continue
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    entry = StateEntry(kind="optimizer_state", names=(f"{name}:{key}",))
                    slots.append(StateSlot(entry=entry, tensor=value, places=((state, key),)))
    if foreign:
        raise CaptureError(
            f"{foreign} parameters of the {type(optimizer).__name__} are not parameters of the "
            "module; build the optimizer from the module that is captured"
        )
    return slots


@contextmanager
def swapped_optimizer(
    optimizer: torch.optim.Optimizer | None, traced: dict[int, torch.Tensor]
) -> Iterator[None]:
    """The optimizer steps on the traced parameters: ``traced`` maps the id of a real one to it.

    Raises:
        CaptureError: on leaving, if the step created optimizer state, which a replay would lose.
    """
    if optimizer is None:
        yield
        return
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    known = {(id(parameter), key) for parameter, value in state.items() for key in value}
    real_of = {id(tensor): real for real, tensor in traced.items()}
    try:
        for group in optimizer.param_groups:
            group["params"] = [traced[id(parameter)] for parameter in group["params"]]
        optimizer.state.clear()
        for parameter, value in state.items():
            optimizer.state[traced[id(parameter)]] = value
        yield
        created = sorted(
            {
                key
                for parameter, value in optimizer.state.items()
                for key in value
                if (real_of[id(parameter)], key) not in known
            }
        )
        if created:
            raise CaptureError(
                f"{type(optimizer).__name__}.step created the state {created} during the "
                "capture, and a replay would lose it; run one step, or initialise the state, "
                "before capturing"
            )
    finally:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        optimizer.state.clear()
        optimizer.state.update(state)
