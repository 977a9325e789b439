"""What a capture depends on besides tensors' values: modes of modules, autocast, hooks.

Python read them once, while it traced. A replay runs operators and nothing else, so that another
mode, or a hook that came later, would change nothing and say nothing. They are recorded with the
capture, and compared before every run. Global hooks, which run in the calls of all modules, are
refused at the capture and at every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from gt_trace._torch_internals import (
    GLOBAL_HOOKS,
    DisableTorchFunction,
    function_modes,
    get_proxy_mode,
    is_any_autocast_enabled,
)
from gt_trace.capture.autocast_cache import SurroundingAutocast
from gt_trace.capture.failing_node import note_failing_node
from gt_trace.capture.read_values import ReadValues, StoredValues
from gt_trace.capture.stack_traces import line_of_user
from gt_trace.capture.thread_settings import (
    Settings,
    named_settings,
    setting_problems,
    settings_now,
)
from gt_trace.errors import CaptureError, StateMismatchError
from gt_trace.node_metadata import phase_of

GRADIENT_HOOKS = "_backward_hooks"
"""Attribute in which a parameter keeps the hooks of ``register_hook``; none is public."""

ACCUMULATION_HOOKS = "_post_accumulate_grad_hooks"
"""Attribute in which a parameter keeps the hooks of ``register_post_accumulate_grad_hook``."""

_REGISTERED_BY = {
    GRADIENT_HOOKS: "register_hook",
    ACCUMULATION_HOOKS: "register_post_accumulate_grad_hook",
}

# Likewise of a module.
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Captured = TypeVar("Captured")

_STALE_CASTS = (
    "parameters changed inside of the region of autocast that surrounds the steps, whose cache has "
    "casts of their former values; enter autocast for each step, or with cache_enabled=False"
)

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedMode:
    """The modes in which a step was captured."""

    training: Mapping[str, bool] = field(default_factory=dict)
    """Whether each module was in training mode, by its name; the captured module's own is ""."""

    num_hooks: Mapping[str, int] = field(default_factory=dict)
    """How many forward and backward hooks a module had, by its name; those without are missing.
    They ran while it was captured: what they compute is part of the graph."""

    trainable: frozenset[str] = frozenset()
    """Names of the parameters that required a gradient."""

    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtype to which autocast cast, by type of device; devices where it was off are missing."""

    autocast_cache: bool = True
    """Whether autocast kept the casts of parameters."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of PyTorch and of the thread that decide which operators run, as texts by name."""

    autograd: bool | None = None
    """Whether autograd was enabled; None for a step with a backward, which needs it: a graph has
    its own, and runs wherever it is called."""

    values: ReadValues | StoredValues | None = field(default=None, compare=False, repr=False)
    """Values outside of tensors that the step may have read. A file has those of the module."""

    @classmethod
    def now(cls, module: nn.Module | None) -> CapturedMode:
        """The modes of ``module``, and of autocast, at this moment."""
        named = {} if module is None else dict(module.named_modules())
        counts = {name: sum(map(len, _hook_tables_of(each))) for name, each in named.items()}
        return cls(
            training={name: each.training for name, each in named.items()},
            num_hooks={name: count for name, count in counts.items() if count},
            trainable=frozenset(_trainable(module)),
            autocast=_autocast_now(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            settings=named_settings(settings_now()),
            autograd=torch.is_grad_enabled(),
        )

    def of_graph(self, graph_module: GraphModule) -> CapturedMode:
        """Return the modes for this graph: if it has a backward, autograd may be disabled."""
        if any(phase_of(node) == "backward" for node in graph_module.graph.nodes):
            return replace(self, autograd=None)
        return self


class ModeGuard:
    """Refuses to run a capture in another mode than it was made in.

    A check costs about as much as reading a few attributes of every module. ``lost_hooks`` are the
    kinds of hooks of parameters that would not run.

    Raises:
        StateMismatchError: the module differs; see ``check`` for what is listed.
    """

    def __init__(
        self,
        captured: CapturedMode,
        module: nn.Module | None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lost_hooks: tuple[str, ...] = (GRADIENT_HOOKS,),
    ) -> None:
        self._captured = captured
        self._module = module
        self._values: ReadValues | None = None
        if (values := captured.values) is not None:
            given = {"module": module, "optimizer": optimizer}
            self._values = values.of(
                {name: each for name, each in given.items() if each is not None}
            )
            if problems := values.differences(self._values):
                self._refuse(problems)
        self._lost_hooks = lost_hooks
        self._version = 1  # that of inputs which were sampled once
        self._settings: Settings | None = None
        self._look()

    def check(self, version: int) -> None:
        """Compare modes and hooks of the module, and autocast, with the captured ones.

        Args:
            version: another number than at the last check if submodules or parameters may have been
                replaced since.

        Raises:
            StateMismatchError: they differ. Listed is every difference of modes of modules (of one
                that changed with all that it holds, in one sentence), of numbers of hooks, of
                parameters and of global hooks. If these are alike, that hooks were replaced by as
                many others is told, not of which modules; and if those are too, autocast, then
                settings of PyTorch and of the thread, then whether autograd is enabled.
        """
        if is_replaced := version != self._version:
            self._look()
        if self._values is not None and (
            problems := self._values.problems(is_replaced=is_replaced)
        ):
            self._refuse(problems)
        self._version = version
        if (
            [each.training for each in self._modules] != self._training
            or list(chain.from_iterable(self._hooks)) != self._hook_numbers
            or [each.requires_grad for each in self._parameters] != self._trainable
            or any(getattr(each, kind) for kind in self._lost_hooks for each in self._parameters)
            or _global_hook_problems()
        ):
            self._refuse(self._module_problems() or ["hooks of modules were replaced by others"])
        autocast = _autocast_now()
        if autocast != self._captured.autocast:
            was = _shown(self._captured.autocast)
            self._refuse([f"autocast is {_shown(autocast)}, and was {was}"])
        if torch.is_autocast_cache_enabled() is not self._captured.autocast_cache:
            now, was = ("off", "on") if self._captured.autocast_cache else ("on", "off")
            self._refuse([f"autocast's cache is {now}, and was {was} (cache_enabled)"])
        if autocast and self._captured.autocast_cache and self._surrounding.is_stale(autocast):
            self._refuse([_STALE_CASTS])
        settings = settings_now()
        if settings != self._settings:
            if get_proxy_mode() is not None:
                raise CaptureError(
                    "a captured step is called inside of a step that is being captured; call the "
                    f"function that it was made of:\n{line_of_user()}"
                )
            if problems := setting_problems(self._captured.settings, settings):
                self._refuse(problems)
            self._settings = settings
        if self._captured.autograd not in (None, torch.is_grad_enabled()):
            state = "enabled" if self._captured.autograd else "disabled"
            problem = (
                f"autograd was {state}, and operators may depend on it; call the step where it is "
                f"{state} (torch.enable_grad or torch.no_grad), or capture again"
            )
            self._refuse([problem])

    def _look(self) -> None:
        """Note what to compare, after a first look at it."""
        if problems := self._module_problems():
            self._refuse(problems)
        self._modules = [] if self._module is None else list(self._module.modules())
        self._training = [each.training for each in self._modules]
        self._hooks = [hooks for each in self._modules for hooks in _hook_tables_of(each)]
        self._hook_numbers = list(chain.from_iterable(self._hooks))
        self._parameters = [] if self._module is None else list(self._module.parameters())
        self._trainable = [each.requires_grad for each in self._parameters]
        self._surrounding = SurroundingAutocast(self._parameters)

    def _module_problems(self) -> list[str]:
        was, now = self._captured, CapturedMode.now(self._module)
        problems = _mode_problems(was.training, now.training)
        for name in dict.fromkeys((*was.training, *now.training)):
            if name not in now.training or name not in was.training:
                is_now = "is gone" if name in was.training else "is new"
                problems.append(f"{_of(name)} {is_now}")
                continue
            counts = now.num_hooks.get(name, 0), was.num_hooks.get(name, 0)
            if counts[0] != counts[1]:
                problems.append(
                    f"{_of(name)} has {counts[0]} hooks, and had {counts[1]}; those that were "
                    "there are part of the graph, and others would not run"
                )
        changed = was.trainable ^ now.trainable
        for name in sorted(changed):
            requires = (
                "requires a gradient, and did not"
                if name in now.trainable
                else ("requires no gradient, and did")
            )
            problems.append(f"parameter {name} {requires}")
        if self._module is not None:
            problems += hook_problems(self._module, self._lost_hooks)
        return problems + _global_hook_problems()

    def _refuse(self, problems: Iterable[str]) -> None:
        raise StateMismatchError(
            "this is not as it was when it was captured:\n  " + "\n  ".join(problems)
        )


def _mode_problems(was: Mapping[str, bool], now: Mapping[str, bool]) -> list[str]:
    """A sentence for each module in another mode, or for one that has it with all that it holds."""
    changed = {name: now[name] for name in was if name in now and was[name] != now[name]}
    problems = []
    told: set[str] = set()
    for name, mode in changed.items():
        if name in told:
            continue
        inside = [each for each in now if (each and not name) or each.startswith(f"{name}.")]
        modes = f"in {_mode(mode)} mode, and {{}} in {_mode(not mode)} mode"
        if inside and all(changed.get(each) is mode for each in inside):
            told.update(inside)
            problems.append(f"{_of(name)} and all {len(inside)} in it are {modes.format('were')}")
        else:
            problems.append(f"{_of(name)} is {modes.format('was')}")
    return problems


def hook_problems(module: nn.Module, lost_hooks: tuple[str, ...]) -> list[str]:
    """A sentence for each parameter of ``module`` that has hooks of these kinds."""
    return [
        f"parameter {name} has a hook by {_REGISTERED_BY[kind]}, which would not run; remove it, "
        "and change gradients after the step"
        for name, parameter in module.named_parameters()
        for kind in lost_hooks
        if getattr(parameter, kind)
    ]


def refuse_gradient_hooks(module: nn.Module | None) -> None:
    """Refuse gradient hooks of parameters: what stands for parameters in a trace has none.

    Raises:
        CaptureError: lists every such parameter.
    """
    problems = [] if module is None else hook_problems(module, (GRADIENT_HOOKS,))
    if problems:
        raise CaptureError("a capture loses hooks of parameters:\n  " + "\n  ".join(problems))


def _global_hook_problems() -> list[str]:
    """A sentence for each kind of hooks of all modules, but for those by which PyTorch watches."""
    counts = {
        kind: sum(not _is_of_torch(hook) for hook in hooks.values())
        for kind, hooks in GLOBAL_HOOKS.items()
    }
    return [
        f"{kind} of all modules: {count}, which a replay would not run; remove them, or register "
        "them on modules"
        for kind, count in counts.items()
        if count
    ]


def _is_of_torch(hook: object) -> bool:
    """Whether PyTorch registered it: ``FlopCounterMode`` and its like follow calls, no more."""
    return str(getattr(hook, "__module__", None)).partition(".")[0] == "torch"


def with_settled_hooks(module: nn.Module | None, capture: Callable[[], Captured]) -> Captured:
    """Capture again if the module installed hooks while it ran for the first time.

    Whether those ran in the first capture depends on where they were installed. In the second they
    were there from the beginning, as in every later call. Hooks are told apart by the numbers of
    their handles, which PyTorch gives once: one that is removed and registered again is another.

    Args:
        module: that is captured.
        capture: makes the capture.

    Returns:
        What ``capture`` returned, for the module with the hooks that it has.

    Raises:
        CaptureError: it installs others each time, or there are global hooks.
    """
    before = _hook_numbers(module)
    captured = capture()
    settled = _hook_numbers(module)
    if settled == before:
        return captured
    captured = capture()
    after = _hook_numbers(module)
    if after == settled:
        return captured
    problems = [
        _hooks_changed(_of(name), settled.get(name, []), after.get(name, []))
        for name in dict.fromkeys((*settled, *after))
        if settled.get(name) != after.get(name)
    ]
    raise CaptureError(
        "the step installs other hooks each time that it runs, and a graph has those of its "
        "capture; let it install each once:\n  " + "\n  ".join(problems)
    )


def _hooks_changed(module: str, before: list[int], after: list[int]) -> str:
    if len(before) != len(after):
        return f"{module} has {len(after)} hooks, and had {len(before)}"
    num_replaced = len(set(before) - set(after))
    if num_replaced == 1:
        return f"a hook of {module} was replaced by another"
    return f"{num_replaced} hooks of {module} were replaced by others"


class _Replay:
    """An error that leaves it gets a note of the node that failed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            note_failing_node(error)


_REPLAY = _Replay()


def as_captured() -> AbstractContextManager[object]:
    """Where a captured graph runs: without autograd, ambient autocast and torch function modes.

    The graph holds its own backward, and its casts are operators of it; autocast would cast again
    what the backward computed in another dtype. An error gets a note of the node that failed.
    """
    autocast, modes = _autocast_now(), function_modes()
    if not autocast and not modes and not torch.is_grad_enabled():
        return _REPLAY  # as pipelines run them, many times a step
    stack = ExitStack()
    stack.enter_context(_REPLAY)
    stack.enter_context(torch.no_grad())
    if modes:
        stack.enter_context(DisableTorchFunction())
    for device in autocast:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def hooks_of(module: nn.Module) -> list[Any]:
    """Forward and backward hooks of a module."""
    return [hook for hooks in _hook_tables_of(module) for hook in hooks.values()]


def _hook_numbers(module: nn.Module | None) -> dict[str, list[int]]:
    """The numbers of the hooks of each module that has any, by its name.

    Raises:
        CaptureError: there are global hooks.
    """
    if problems := _global_hook_problems():
        raise CaptureError("a capture refuses global hooks:\n  " + "\n  ".join(problems))
    named = {} if module is None else dict(module.named_modules())
    found = {name: [*chain.from_iterable(_hook_tables_of(each))] for name, each in named.items()}
    return {name: numbers for name, numbers in found.items() if numbers}


def _hook_tables_of(module: nn.Module) -> list[Mapping[int, Any]]:
    return [getattr(module, name) for name in _MODULE_HOOKS]


def _trainable(module: nn.Module | None) -> Iterator[str]:
    if module is not None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                yield name


def _autocast_now() -> dict[str, torch.dtype]:
    if not (is_any_autocast_enabled() or torch.is_autocast_enabled("mps")):
        return {}
    return {
        device: torch.get_autocast_dtype(device)
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    }


def _shown(autocast: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"on for {each} in {dtype}" for each, dtype in autocast.items()) or "off"


def _of(name: str) -> str:
    return f"module {name}" if name else "the module"


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"
