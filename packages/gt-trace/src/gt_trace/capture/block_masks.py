"""FlexAttention's masks as trees, so that their tensors are inputs of a graph.

Those that a mask's function closes over are its data as much as the blocks are: the documents of a
batch. PyTorch leaves it to others to make masks a kind of tree. How it would take one apart depends
on its version; 2.11 leaves in the function what that closes over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from gt_trace._torch_internals import pytree

_TENSORS = tuple(
    f"{full}{side}_{what}"
    for side in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """A function without what it closes over and its defaults; equal to others of its code."""

    code: CodeType
    values: pytree.TreeSpec
    """Of the contents of its cells and of its defaults."""

    functions: tuple[Any, ...]
    """For each leaf of those, a function likewise; None for what is none."""

    made_from: FunctionType = field(compare=False)

    def with_values(self, values: list[Any]) -> FunctionType:
        """The function with others, which are taken off the list's front."""
        leaves = [
            values.pop(0) if each is None else _with_values(each, values) for each in self.functions
        ]
        cells, defaults, named = pytree.tree_unflatten(leaves, self.values)
        old = self.made_from
        made = FunctionType(
            self.code, old.__globals__, old.__name__, defaults, tuple(map(CellType, cells))
        )
        made.__qualname__, made.__kwdefaults__ = old.__qualname__, named
        made.__dict__.update(old.__dict__)
        return made

    def text(self, *, with_lines: bool) -> str:
        """Its name and, in brackets, those of the functions that it calls."""
        name = self.made_from.__qualname__
        if with_lines:
            name += f" of {self.code.co_filename}:{self.code.co_firstlineno}"
        called = [_text(each, with_lines=with_lines) for each in self.functions if each is not None]
        return f"{name}({', '.join(called)})" if called else name


class _Context(NamedTuple):
    """What a mask is apart from values."""

    seq_lengths: Any
    BLOCK_SIZE: Any
    mask_mod: Any


def register_block_masks() -> None:
    """Make FlexAttention's masks a kind of tree.

    Nothing is done where nothing has imported FlexAttention, or where somebody else did so.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    kind: Any = getattr(module, "BlockMask", None)
    if kind is None or kind in pytree.SUPPORTED_NODES:
        return

    def unflatten(values: Any, context: Any) -> Any:
        named = dict(zip(_TENSORS, values, strict=False))
        mask_mod = _with_values(context.mask_mod, list(values)[len(_TENSORS) :])
        return kind(**{**context._asdict(), **named, "mask_mod": mask_mod})

    pytree.register_pytree_node(kind, _flatten, unflatten, flatten_with_keys_fn=_flatten_with_keys)


def context_differences(
    captured: pytree.TreeSpec, now: pytree.TreeSpec
) -> list[tuple[str, str, str]]:
    """Return in what two trees of one type differ besides their children: (what, captured, now).

    Of FlexAttention's masks, attribute by attribute, for the text of a whole one has megabytes.
    """
    if not isinstance(captured.context, _Context):
        return [("context", repr(captured.context)[:200], repr(now.context)[:200])]
    differences: list[tuple[str, str, str]] = []
    for name, before, after in zip(_Context._fields, captured.context, now.context, strict=True):
        if before == after:
            continue
        texts = [_text(value, with_lines=False) for value in (before, after)]
        if texts[0] == texts[1]:
            texts = [_text(value, with_lines=True) for value in (before, after)]
        differences.append((name, texts[0], texts[1]))
    return differences


def _flatten(mask: Any) -> tuple[list[Any], _Context]:
    values = [getattr(mask, name) for name in _TENSORS]
    mask_mod = _without_values(mask.mask_mod, values, ())
    return values, _Context(mask.seq_lengths, mask.BLOCK_SIZE, mask_mod)


def _flatten_with_keys(mask: Any) -> tuple[list[tuple[Any, Any]], _Context]:
    values, context = _flatten(mask)
    closed_over = (f"_closure_{index}" for index in range(len(values) - len(_TENSORS)))
    keys = map(pytree.GetAttrKey, (*_TENSORS, *closed_over))
    return list(zip(keys, values, strict=True)), context


def _without_values(function: Any, values: list[Any], callers: Sequence[Any]) -> Any:
    """The code of a function, whose values are added to the list.

    Objects that are called, what calls itself, and all of it while Dynamo reads a function, stay.
    """
    if (
        not isinstance(function, FunctionType)
        or function in callers
        or torch.compiler.is_compiling()
    ):
        return function
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = (cells, function.__defaults__ or (), function.__kwdefaults__ or {})
    leaves, spec = pytree.tree_flatten(held)
    functions: list[Any] = []
    for leaf in leaves:
        is_function = isinstance(leaf, FunctionType)
        if not is_function:
            values.append(leaf)
        inner = _without_values(leaf, values, (*callers, function)) if is_function else None
        functions.append(inner)
    return _Code(
        code=function.__code__, values=spec, functions=tuple(functions), made_from=function
    )


def _with_values(function: Any, values: list[Any]) -> Any:
    return function.with_values(values) if isinstance(function, _Code) else function


def _text(value: Any, *, with_lines: bool) -> str:
    return value.text(with_lines=with_lines) if isinstance(value, _Code) else repr(value)[:200]
