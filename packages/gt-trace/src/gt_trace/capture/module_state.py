"""The tensors that a training step reads besides its arguments, and how to swap them.

Parameters, buffers and optimizer state become inputs of the captured graph. While a trace runs,
the live objects hold the traced tensors instead of their own; afterwards they are as before, also
when the trace failed.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from gt_trace.capture.optimizer_state import optimizer_tensors
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
            module's.
    """
    if module is None:
        if optimizer is not None:
            raise CaptureError(
                "an optimizer was given without its module; pass module= too, so that its "
                "parameters can be named"
            )
        return []
    _refuse_modules(module)
    slots = [*_tensors(module, "parameter"), *_tensors(module, "buffer")]
    if optimizer is None:
        return slots
    places = {id(slot.tensor): slot for slot in slots}
    for name, tensor, place in optimizer_tensors(optimizer, parameter_names(slots)):
        known = places.get(id(tensor))
        if known is None:
            entry = StateEntry(kind="optimizer_state", names=(name,))
        elif known.entry.kind == "optimizer_state":
            entry = replace(known.entry, names=(*known.entry.names, name))
        else:  # a learning rate that is a buffer of the module, too
            entry = known.entry
        held = known.places if known is not None else ()
        places[id(tensor)] = StateSlot(entry=entry, tensor=tensor, places=(*held, place))
    return list(places.values())


def parameter_names(slots: Sequence[StateSlot]) -> dict[int, str]:
    """Return the names of parameters by their ids."""
    return {id(slot.tensor): slot.entry.name for slot in slots if slot.entry.kind == "parameter"}


def state_names(slots: Sequence[StateSlot]) -> dict[int, str]:
    """Return how messages name the tensors of the state, by their ids."""
    return {id(slot.tensor): f"{slot.entry.name} of the module" for slot in slots}


def _refuse_modules(module: nn.Module) -> None:
    """Refuse modules whose parameters cannot be exchanged.

    Raises:
        CaptureError: lists each.
    """
    problems = [
        f"module {name or type(each).__name__} is compiled by TorchScript, into which a trace does "
        "not look; use the module that was scripted or traced"
        for name, each in module.named_modules()
        if isinstance(each, torch.jit.ScriptModule)
    ]
    problems += [
        f"parameter {name} has no shape yet; call the module once before the capture"
        for name, each in module.named_parameters()
        if isinstance(each, UninitializedParameter)
    ]
    if problems:
        raise CaptureError("the module cannot be captured:\n  " + "\n  ".join(problems))


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
