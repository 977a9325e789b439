"""Hooks of modules that a placed model does not call, which would be lost without a word."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from gt_autoparallel._torch_internals import module_hooks


def hooks_of_inner_modules(model: nn.Module, *, called: Collection[str]) -> Iterator[str]:
    """A line for each module inside ``model`` with hooks that the placed model does not run.

    Args:
        model: placed, or to be placed.
        called: names of modules that the placed model calls, with all that they hold: the routed
            experts.
    """
    for name, module in model.named_modules():
        if name and not any(name == each or name.startswith(f"{each}.") for each in called):
            registered = module_hooks(module)
            if registered:
                yield f"{name} has hooks ({', '.join(registered)})"


def hooks_of_model(model: nn.Module) -> Iterator[str]:
    """A line if ``model`` itself has hooks: they run around the plan, which has them already."""
    registered = module_hooks(model)
    if registered:
        yield (
            f"the model itself has hooks ({', '.join(registered)}), which ran while it was planned "
            "and would run once more around the plan; register them after it is placed"
        )
