"""How a sharded module reads its parameters: stored at rest, gathered while a forward runs.

A module that holds sharded parameters gets a class of its own kind whose properties gather; which
forwards run, and what they gathered, an activity keeps, which forward hooks drive. Source of the
properties: SimpleFSDP (arXiv 2411.00284), which reads parameters through parametrizations.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from gt_trace.errors import GtTraceError
from gt_trace.fsdp.collectives import InnerPlacement, UnshardPlan, unshard

_PARAMETERS = "_gt_sharded_parameters"
_ACTIVITY = "_gt_activity"


class ShardingError(GtTraceError, ValueError):
    """A model cannot be sharded as asked. The text lists every reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """How one stored parameter becomes the one that the forward computes with."""

    name: str
    """Fully qualified name of the parameter in the whole model."""

    plan: UnshardPlan
    placements: tuple[Placement, ...]
    """How the stored DTensor is placed on its mesh."""

    inner_mesh: DeviceMesh | None
    """The tensor- or expert-parallel mesh on which the gathered parameter is a DTensor."""

    inner_placements: tuple[Placement, ...]

    def gather(self, stored: torch.Tensor, names: tuple[str, ...] | None = None) -> torch.Tensor:
        """The whole of ``stored``; ``names`` annotate the collectives, if tying changed them.

        Raises:
            ShardingError: ``stored`` is not placed as what was sharded.
        """
        if not isinstance(stored, DTensor) or stored.placements != self.placements:
            raise ShardingError(self._explain_replaced(stored))
        local = stored.to_local()
        plan = self.plan
        if names is not None and names != plan.parameter_names:
            plan = replace(plan, parameter_names=names)
        inner = None
        if self.inner_mesh is not None:
            inner = InnerPlacement(
                mesh=self.inner_mesh,
                placements=self.inner_placements,
                shape=stored.shape,
                stride=stored.stride(),
            )
        return unshard(local, plan, inner)

    def computes_as(self, other: ShardedParameter) -> bool:
        """Whether both make the same tensor of the same stored parameter."""
        return self is other or (
            replace(self.plan, parameter_names=()) == replace(other.plan, parameter_names=())
            and self.inner_mesh == other.inner_mesh
            and self.inner_placements == other.inner_placements
        )

    def _explain_replaced(self, stored: torch.Tensor) -> str:
        found = f"placed as {stored.placements}" if isinstance(stored, DTensor) else "no DTensor"
        return (
            f"{self.name} was replaced after sharding by a parameter that is {found}; it must be "
            f"a DTensor placed as {self.placements}, as the sharded one was"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owners:
    """Who holds one stored parameter at present; weights may be tied after sharding too."""

    names: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A parameter that was gathered in the forward that runs."""

    stored: torch.Tensor
    version: int
    sharded: ShardedParameter
    whole: torch.Tensor


class Activity:
    """The forwards that run, and what they have gathered so far.

    Parameters are gathered while a forward runs: each once in the forward of its module, and a
    tied one once in the whole forward, so that the parts of its gradient are summed before they
    are reduced (FSDP2 does the same, and the rounding agrees). With ``torch.no_grad`` there is no
    gradient to sum, and nothing is kept.
    """

    def __init__(self, *, originals: Sequence[tuple[str, weakref.ref[nn.Parameter]]] = ()) -> None:
        self.originals = originals
        """Names and, while they live, the whole parameters that the sharded ones replaced."""

        self.outer: Activity | None = None
        """Activity of a model that was sharded around this one."""

        self._running: list[nn.Module] = []
        """Modules whose forwards run, the outermost first."""

        self._num_holds = 0
        self._owners: dict[int, _Owners] | None = None
        self._gathered: dict[int, _Gathered] = {}

    def enter(self, module: nn.Module, *_: Any) -> None:
        """A forward of ``module`` begins."""
        self._running.append(module)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """A forward of ``module`` ends; with the outermost one, everything is let go."""
        if not self._running or self._running[-1] is not module:
            # A pre-hook that came before ours raised: this forward was never entered.
            return
        self._running.pop()
        if not self._running:
            self._owners = None
            self._gathered.clear()
        elif self._gathered and self._num_holds == 0:
            for name in sharded_parameters(module):
                key = id(module._parameters[name])
                owners = self._known(key)
                if owners is None or owners.count == 1:
                    self._gathered.pop(key, None)

    @contextmanager
    def hold(self, module: nn.Module) -> Iterator[None]:
        """As in one long forward of ``module``; what is gathered inside stays until the end."""
        self.enter(module)
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            self.leave(module)

    def running(self) -> Activity | None:
        """The outermost activity with a forward that runs, or None."""
        found: Activity | None = None
        activity: Activity | None = self
        while activity is not None:
            if activity._running:
                found = activity
            activity = activity.outer
        return found

    def gather(self, stored: torch.Tensor, sharded: ShardedParameter) -> torch.Tensor:
        """The whole parameter, from this forward's earlier reads if there were any."""
        key = id(stored)
        earlier = self._gathered.get(key)
        if (
            earlier is not None
            and earlier.version == stored._version
            and earlier.sharded.computes_as(sharded)
        ):
            return earlier.whole
        owners = self._known(key)
        whole = sharded.gather(stored, None if owners is None else owners.names)
        if whole.requires_grad:
            self._gathered[key] = _Gathered(
                stored=stored, version=stored._version, sharded=sharded, whole=whole
            )
        return whole

    def _known(self, key: int) -> _Owners | None:
        if self._owners is None:
            self._owners = _find_owners(self._running[0])
        return self._owners.get(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Activity:
        """A copy of a model runs on its own, and starts at rest."""
        memo[id(self)] = copied = Activity()
        copied.outer = copy.deepcopy(self.outer, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return vars(Activity()) | {"outer": self.outer}


def _find_owners(model: nn.Module) -> dict[int, _Owners]:
    names: dict[int, list[str]] = {}
    for module in model.modules():
        for name, sharded in sharded_parameters(module).items():
            names.setdefault(id(module._parameters[name]), []).append(sharded.name)
    return {key: _Owners(names=tuple(n), count=len(n)) for key, n in names.items()}


def sharded_parameters(module: nn.Module) -> Mapping[str, ShardedParameter]:
    """The sharded parameters that ``module`` itself holds, by attribute name."""
    found: Mapping[str, ShardedParameter] = vars(module).get(_PARAMETERS, {})
    return found


def activity_of(module: nn.Module) -> Activity | None:
    """The activity that decides what ``module`` reads; None if it holds nothing sharded."""
    found: Activity | None = vars(module).get(_ACTIVITY)
    return found


def give_properties(
    module: nn.Module, parameters: dict[str, ShardedParameter], activity: Activity
) -> Callable[[], None]:
    """Let the instance read its parameters through properties, by a class of its own kind.

    Returns:
        What takes the properties away again.
    """
    original = type(module)
    vars(module)[_PARAMETERS] = parameters
    vars(module)[_ACTIVITY] = activity
    module.__class__ = _sharded_class(original, tuple(parameters))

    def undo() -> None:
        module.__class__ = original
        del vars(module)[_PARAMETERS], vars(module)[_ACTIVITY]

    return undo


_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def _sharded_class(original: type, names: tuple[str, ...]) -> type:
    key = (original, names)
    if key not in _classes:
        body: dict[str, Any] = {name: property(_reader(name)) for name in names}
        body["__reduce_ex__"] = lambda self, _protocol: (
            _rebuild,
            (original, names),
            vars(self),
        )
        body["__module__"] = original.__module__
        body["__doc__"] = original.__doc__
        _classes[key] = type(f"Sharded{original.__name__}", (original,), body)
    return _classes[key]


def _rebuild(original: type, names: tuple[str, ...]) -> Any:
    """An empty instance for ``copy.deepcopy`` and ``pickle``, which find no generated class."""
    cls: Any = _sharded_class(original, names)
    return cls.__new__(cls)


def _reader(name: str) -> Callable[[nn.Module], torch.Tensor | None]:
    def read(self: nn.Module) -> torch.Tensor | None:
        stored = self._parameters[name]
        own: Activity = vars(self)[_ACTIVITY]
        activity = own.running()
        if stored is None or activity is None:
            return stored
        return activity.gather(stored, vars(self)[_PARAMETERS][name])

    return read
