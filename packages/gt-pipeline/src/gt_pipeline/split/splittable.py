"""A check that a model's forward bears what a split does to it.

It runs the stages one after the other, as a pipeline would, and compares with the whole model. On
the meta device that costs no memory and compares shapes; elsewhere it compares every bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gt_pipeline.errors import NotSplittableError
from gt_pipeline.split.cover import check_cover
from gt_pipeline.split.removal import DEFAULT_POLICY, RemovalPolicy
from gt_pipeline.split.shared_groups import SharedGroup
from gt_pipeline.split.split_module import split_module


def check_splittable(
    model: nn.Module,
    names_per_stage: Sequence[Sequence[str]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: RemovalPolicy = DEFAULT_POLICY,
    shared_groups: Sequence[SharedGroup] = (),
) -> None:
    """Check that the stages, run one after the other, compute what the model computes.

    What a forward must bear: a dropped child is what ``policy`` puts in its place, and the first
    argument of a later stage is what the stage before returned. As in PyTorch's pipelines, ``args``
    go to the first stage and ``kwargs`` to every one. One stage is copied at a time. Random
    numbers are drawn from one seed, in the order of the stages; buffers of ``model`` stay as they
    are.

    Args:
        model: the whole model; give one on the meta device if it is large.
        names_per_stage: for each stage, names of modules.
        args: example of one microbatch, on the model's device.
        kwargs: example arguments that each stage gets.
        policy: what replaces a dropped child.
        shared_groups: parameters that may stand on several stages.

    Raises:
        StageNamesError: as :func:`check_cover`.
        TiedParametersError: as :func:`check_cover`.
        NotSplittableError: a forward fails, or results differ; names the stage and says why.
    """
    check_cover(model, names_per_stage, shared_groups=shared_groups)
    named = dict(kwargs or {})
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        # Clones take what the forward writes into buffers.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        expected = torch.func.functional_call(model, buffers, args, named)
        torch.manual_seed(0)
        result: Any = args
        for index, names in enumerate(names_per_stage):
            stage = split_module(model, names, policy=policy, shared_groups=shared_groups)
            passed = tuple(result) if isinstance(result, tuple | list) else (result,)
            label = f"stage {index} ({', '.join(names)})"
            try:
                result = stage(*passed, **named)
            except Exception as error:
                problems = [
                    f"{label} fails on {_describe(passed)}: {type(error).__name__}: {error}",
                    f"what it lacks is replaced by {policy}: use another one, or skip in forward",
                ]
                raise _not_splittable(model, names_per_stage, problems) from error
            values = result if isinstance(result, tuple | list) else [result]
            passes = all(isinstance(value, torch.Tensor) for value in values)
            if index < len(names_per_stage) - 1 and not passes:
                problem = f"{label} returns {_describe(result)}: only tensors pass between stages"
                raise _not_splittable(model, names_per_stage, [problem])
    problems = _differences(expected, result)
    if problems:
        raise _not_splittable(model, names_per_stage, problems)


def _not_splittable(
    model: nn.Module, names_per_stage: Sequence[Sequence[str]], problems: Sequence[str]
) -> NotSplittableError:
    what = f"{type(model).__name__} in {len(names_per_stage)} stages"
    return NotSplittableError(what=what, problems=problems)


def _differences(expected: object, found: object) -> list[str]:
    wanted, seen = _leaves(expected), _leaves(found)
    if list(wanted) != list(seen):
        return [f"the last stage returns {_describe(found)}, the model {_describe(expected)}"]
    problems = []
    for path, value in wanted.items():
        other = seen[path]
        where = f"result{path}"
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            same_kind = _describe(value) == _describe(other)
            if same_kind and not value.is_meta and not _same_bits(value, other):
                problems.append(f"{where} of the last stage has other values than the model's")
        else:
            same_kind = type(value) is type(other)
        if not same_kind:
            problems.append(
                f"{where} of the last stage is {_describe(other)}, of the model {_describe(value)}"
            )
    return problems


def _leaves(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, tuple | list):
        items = [(f"[{index}]", each) for index, each in enumerate(value)]
    else:
        return {path: value}
    return {
        name: leaf for suffix, each in items for name, leaf in _leaves(each, path + suffix).items()
    }


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key}: {_describe(each)}" for key, each in value.items())
        return f"{type(value).__name__}({inner})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__
