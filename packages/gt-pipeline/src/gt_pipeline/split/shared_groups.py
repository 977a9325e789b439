"""Parameters that are one: found in a model, or declared to stay one across stages.

Splitting copies each stage's parameters, so a parameter on two stages becomes two, and training
them apart is silently wrong. Whoever declares a shared group promises to add the gradients of its
members, as gt_pipeline.runner does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Parameters that hold the same values on every stage and get the sum of their gradients.

    Attributes:
        names: qualified names in the whole model: ``("tok_embeddings.weight", "lm_head.weight")``,
            or one name that stands on several stages.
    """

    names: tuple[str, ...]


def tied_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of parameters that are one parameter, or share memory, group by group."""
    groups: dict[object, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(_identity(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def share_a_group(names: Sequence[str], groups: Sequence[SharedGroup]) -> bool:
    """Whether one group declares all these parameters."""
    return any(set(names) <= set(group.names) for group in groups)


def group_problems(model: nn.Module, groups: Sequence[SharedGroup]) -> list[str]:
    """What is wrong with declared groups, a sentence each."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    problems = []
    for group in groups:
        shapes = {}
        for name in group.names:
            if name in parameters:
                shapes[name] = (tuple(parameters[name].shape), parameters[name].dtype)
            else:
                problems.append(f"shared group {group.names}: {name!r} is no parameter")
        if len(set(shapes.values())) > 1:
            shown = ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in shapes.items())
            problems.append(f"shared group {group.names}: its parameters differ: {shown}")
        if not group.names:
            problems.append("a shared group has no names")
    counts = Counter(name for group in groups for name in group.names)
    problems += [
        f"{name!r} is in shared groups {count} times" for name, count in counts.items() if count > 1
    ]
    return problems


def _identity(parameter: nn.Parameter) -> object:
    # Two Parameter objects over the same bytes are tied as well. Memory tells only for plain
    # tensors with storage: meta tensors have none, and subclasses keep theirs elsewhere.
    if type(parameter) is not nn.Parameter or parameter.is_meta or not parameter.numel():
        return id(parameter)
    if parameter.layout != torch.strided:
        return id(parameter)
    return (parameter.device, parameter.data_ptr())
