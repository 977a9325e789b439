"""What modules cost: bytes counted, or time measured on a real step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gt_pipeline.errors import StageNamesError
from gt_pipeline.split.named_parts import lies_in, name_problems


def parameter_bytes(model: nn.Module, names: Sequence[str]) -> Mapping[str, int]:
    """Bytes of the parameters of each module named; the meta device counts as any other.

    Raises:
        StageNamesError: a name is unknown, or lies in another one.
    """
    problems = name_problems(model, names)
    if problems:
        raise StageNamesError(what=f"bytes of parts of {type(model).__name__}", problems=problems)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        each: sum(held.nbytes for name, held in parameters.items() if lies_in(name, [each]))
        for each in names
    }


def measure_module_costs(
    model: nn.Module,
    names: Sequence[str],
    step: Callable[[], object],
    *,
    num_runs: int = 5,
    clock: Callable[[], float] | None = None,
) -> Mapping[str, float]:
    """Seconds that the forward of each module takes: the least of several runs.

    Whatever else the machine does only adds to the time. Forwards stand for the whole step: the
    backward of one costs about twice as much, for every kind of layer alike. Ranks measure
    differently: let one measure for all, since all must split alike.

    Args:
        model: the whole model.
        names: qualified names of modules, in the order in which the model runs them.
        step: runs the model's forward once; it may do more.
        num_runs: runs that count. One more comes before them, for what happens only once.
        clock: seconds now. By default the time at which the model's accelerator has done
            everything asked of it before.

    Raises:
        StageNamesError: a name is unknown or no module's, or ``step`` does not call the module.
    """
    what = f"costs of parts of {type(model).__name__}"
    problems = name_problems(model, names)
    modules = dict(model.named_modules(remove_duplicate=False))
    if not problems:
        problems = [f"{name!r} is no module" for name in names if name not in modules]
    if num_runs < 1:
        problems.append(f"num_runs is {num_runs}, must be at least 1")
    if problems:
        raise StageNamesError(what=what, problems=problems)

    now = clock or _clock_of(model)
    runs: list[dict[str, float]] = []
    for _ in range(num_runs + 1):
        seconds: dict[str, float] = {}
        with _timed({name: modules[name] for name in names}, seconds, now):
            step()
        runs.append(seconds)
    missing = [name for name in names if any(name not in seconds for seconds in runs)]
    if missing:
        raise StageNamesError(
            what=what, problems=[f"the step does not call {name!r}" for name in missing]
        )
    return {name: min(seconds[name] for seconds in runs[1:]) for name in names}


@contextmanager
def _timed(
    modules: Mapping[str, nn.Module], seconds: dict[str, float], now: Callable[[], float]
) -> Iterator[None]:
    began: dict[str, float] = {}

    def begin(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            began[name] = now()

        return hook

    def end(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            seconds[name] = seconds.get(name, 0.0) + now() - began[name]

        return hook

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(begin(name)))
        handles.append(module.register_forward_hook(end(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _clock_of(model: nn.Module) -> Callable[[], float]:
    accelerator = torch.accelerator.current_accelerator()
    on = {parameter.device.type for parameter in model.parameters()}
    if accelerator is None or accelerator.type not in on:
        return time.perf_counter

    def after_the_device() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return after_the_device
