"""What is set on a model's modules besides tensors, submodules and hooks, as texts.

A forward reads attributes: scales, numbers of heads, functions put in the place of methods. Those
of torchtitan's modules follow from its configuration, until somebody sets one by hand. All count,
as far as they are data or functions; of tensors the values too, unless they are parameters or
buffers, which are inputs of a graph where others are its constants. Of other objects their classes
count, and of those that a model's author wrote their attributes too; PyTorch's own (process groups,
streams) and this project's say by rank and by run what no graph holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Set

from torch import nn

from gt_trainer.artifacts.plain_data import plain_data

_NO_PART = frozenset({*vars(nn.Module()), "_param_init"})
"""Tables of parameters, buffers, submodules and hooks, and the mode, which are counted elsewhere;
and torchtitan's note of how parameters are drawn, in which no graph differs."""

_OURS = "_gt_"
"""What this project notes on modules begins so. It follows from how tensors are placed, and from
sources that count."""

_MOST_CHARACTERS = 60


def attribute_texts(
    model: nn.Module, *, leave_out: Set[str], meta_device: str
) -> Iterator[tuple[str, str]]:
    """Name and text of each attribute of each module, as ``layers.0.attention.n_heads`` and "16".

    Args:
        model: whose modules are looked at.
        leave_out: names of fields of configurations that no graph depends on.
        meta_device: the type of device that a tensor on meta stands for.
    """
    known: dict[int, str] = {}
    state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _NO_PART or name.startswith(_OURS):
                continue
            path = f"{prefix}.{name}" if prefix else name
            if id(value) not in known:  # modules share functions and configurations
                converted = plain_data(
                    value,
                    path=path,
                    leave_out=leave_out,
                    meta_device=meta_device,
                    takes_any_object=True,
                    is_constant=lambda tensor: id(tensor) not in state,
                )
                known[id(value)] = _short(json.dumps(converted, sort_keys=True, default=repr))
            yield path, known[id(value)]


def _short(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
