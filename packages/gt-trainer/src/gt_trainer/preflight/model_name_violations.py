"""Options that name parts of the model, and name none of this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gt_config import SavedOpSelector, Violation
from gt_config.selectors import is_inside

_EVERY_PARAMETER = ".*"
_PATTERNS = "--optimizer.param_groups"
_SAVED_OPS = "--compile.full_recompute_saved_ops"


def model_name_violations(config: Any) -> Iterator[Violation]:
    """Yield the names that match nothing; builds the model without memory if there are any names.

    Args:
        config: a ``GraphTrainer.Config`` that is sound otherwise.
    """
    patterns = [group.pattern for group in config.optimizer.param_groups]
    saved_ops = config.compile.full_recompute_saved_ops
    if config.model_spec is None or (patterns == [_EVERY_PARAMETER] and not saved_ops):
        return
    with torch.device("meta"):
        model = config.model_spec.model.build()
    yield from _patterns_of_no_parameter(patterns, model)
    yield from _operators_of_no_module(saved_ops, model)


def _patterns_of_no_parameter(patterns: list[str], model: nn.Module) -> Iterator[Violation]:
    """Give each parameter to the first pattern that is found in its name, as torchtitan does."""
    left = [name for name, each in model.named_parameters() if each.requires_grad]
    for index, pattern in enumerate(patterns):
        matched = [name for name in left if re.search(pattern, name)]
        if not matched:
            yield Violation(
                flag=f"{_PATTERNS}.{index}.pattern",
                value=pattern,
                allowed="a pattern that is found in the name of a parameter that no pattern before "
                f"it has: {', '.join(left[:3]) or 'none is left'}, ...",
                fix="correct it, or drop its group",
            )
        left = [name for name in left if name not in matched]
    if left:
        yield Violation(
            flag=f"{_PATTERNS}.{len(patterns) - 1}.pattern" if patterns else _PATTERNS,
            value=patterns[-1] if patterns else [],
            allowed=f"patterns that reach every parameter, and none reaches {left[0]} and "
            f"{len(left) - 1} others",
            fix=f"let the last pattern be {_EVERY_PARAMETER!r}",
        )


def _operators_of_no_module(saved_ops: tuple[str, ...], model: nn.Module) -> Iterator[Violation]:
    modules = [name for name, _ in model.named_modules()]
    for text in saved_ops:
        selector = SavedOpSelector.parse(text)
        namespace, _, name = selector.op.partition(".")
        operator: Any = getattr(torch.ops, namespace)
        try:
            for part in name.split("."):
                operator = getattr(operator, part)
        except AttributeError:
            yield Violation(
                flag=_SAVED_OPS,
                value=text,
                allowed=f"an operator of PyTorch after '::', and there is no {selector.op}",
                fix="correct or drop it",
            )
        if not any(is_inside(each, selector.module_pattern) for each in modules):
            shown = [each for each in modules if each.startswith("layers.0.")][:3]
            yield Violation(
                flag=_SAVED_OPS,
                value=text,
                allowed=f"a pattern of module names before '::', such as {', '.join(shown)}",
                fix="correct or drop it",
            )
