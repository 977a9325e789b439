"""FlexAttention's masks as trees, so that their tensors are inputs of a graph.

Those that a mask's function closes over are its data as much as the blocks are: the documents of a
batch. PyTorch leaves it to others to make masks a kind of tree. How it would take one apart depends
on its version; 2.11 leaves in the function what that closes over.
"""

from __future__ import annotations

import importlib
import marshal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from gt_trace._torch_internals import pytree
from gt_trace.capture.code_digest import function_digest

_FUNCTIONS = (FunctionType, partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """A function, or a partial of one, without the values in it; equal to others of its code.

    It can be pickled for another process of the same program, to be compared with masks there.
    """

    code: CodeType | None
    """None of a partial."""

    values: pytree.TreeSpec
    """Of the contents of its cells and its defaults; of what a partial calls, and its arguments."""

    functions: tuple[Any, ...]
    """For each leaf of those, a function likewise; None for a value."""

    made_from: Any = field(compare=False)

    def with_values(self, values: Iterator[Any]) -> Callable[..., Any]:
        """The function with others, of which it takes as many as it has."""
        leaves = [
            next(values) if each is None else _with_values(each, values) for each in self.functions
        ]
        held, old = pytree.tree_unflatten(leaves, self.values), self.made_from
        if self.code is None:
            return partial(held[0], *held[1], **held[2])
        cells, defaults, named = held
        made = FunctionType(
            self.code, old.__globals__, old.__name__, defaults, tuple(map(CellType, cells))
        )
        made.__qualname__, made.__kwdefaults__ = old.__qualname__, named
        made.__dict__.update(old.__dict__)
        return made

    def __reduce__(self) -> tuple[Callable[..., _Code], tuple[Any, ...]]:
        """As code and the names under which another process finds what it refers to."""
        old = self.made_from
        if self.code is None:
            return _partial_code, (self.values, self.functions)
        written = (marshal.dumps(self.code), old.__module__, old.__name__, old.__qualname__)
        return _function_code, (*written, self.values, self.functions)

    def text(self, *, with_lines: bool) -> str:
        """Its name and, in brackets, those of the functions that it calls."""
        name = "partial" if self.code is None else str(self.made_from.__qualname__)
        if with_lines and self.code is not None:
            name += f" of {self.code.co_filename}:{self.code.co_firstlineno}"
        called = [_text(each, with_lines=with_lines) for each in self.functions if each is not None]
        return f"{name}({', '.join(called)})" if called else name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCode:
    """What a file says of a function: equal to those with the same code."""

    digest: str
    """As ``function_digest`` gives it."""

    name: str

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StoredCode):
            return self.digest == other.digest
        return isinstance(other, _Code) and self.digest == function_digest(other)

    def __hash__(self) -> int:
        return hash(self.digest)

    def text(self, *, with_lines: bool) -> str:
        """Its name; a file does not say of which lines."""
        return self.name


def stored_code(value: Any) -> StoredCode | None:
    """What a file says of an attribute of a mask that is a function; None of any other."""
    if isinstance(value, StoredCode):
        return value
    if not isinstance(value, _Code):
        return None
    return StoredCode(digest=function_digest(value), name=value.text(with_lines=False))


def mask_attributes(spec: pytree.TreeSpec) -> tuple[tuple[str, Any], ...] | None:
    """Attributes of a mask besides its tensors, by name; None for a tree of another type."""
    return spec.context.attributes if isinstance(spec.context, _Context) else None


def mask_structure(
    attributes: Iterable[tuple[str, Any]], children: Sequence[pytree.TreeSpec]
) -> pytree.TreeSpec:
    """The structure of a mask with these attributes besides its tensors.

    Raises:
        ValueError: masks have other attributes.
    """
    from torch.nn.attention.flex_attention import BlockMask

    register_block_masks()
    attributes = tuple(attributes)
    if [name for name, _ in attributes] != list(BlockMask._CONTEXT_ATTRS):
        raise ValueError(f"a mask has other attributes than {', '.join(BlockMask._CONTEXT_ATTRS)}")
    return pytree.TreeSpec(BlockMask, _Context(attributes), list(children))


def _partial_code(values: pytree.TreeSpec, functions: tuple[Any, ...]) -> _Code:
    return _Code(code=None, values=values, functions=functions, made_from=None)


def _function_code(
    written: bytes,
    module: str,
    name: str,
    qualname: str,
    values: pytree.TreeSpec,
    functions: tuple[Any, ...],
) -> _Code:
    code: CodeType = marshal.loads(written)
    cells = tuple(CellType() for _ in code.co_freevars)
    made = FunctionType(code, vars(importlib.import_module(module)), name, None, cells)
    made.__qualname__, made.__module__ = qualname, module
    return _Code(code=code, values=values, functions=functions, made_from=made)


@dataclass(frozen=True, slots=True)
class _Context:
    """What a mask is apart from values, by attribute."""

    attributes: tuple[tuple[str, Any], ...]


def register_block_masks() -> None:
    """Make FlexAttention's masks a kind of tree.

    Nothing is done where nothing has imported FlexAttention, or where somebody else did so.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    kind: Any = getattr(module, "BlockMask", None)
    if kind is None or kind in pytree.SUPPORTED_NODES:
        return

    def unflatten(values: Iterable[Any], context: Any) -> Any:
        remaining = iter(values)
        named = {name: next(remaining) for name in kind._TENSOR_ATTRS}
        rest = {name: _with_values(value, remaining) for name, value in context.attributes}
        mask = object.__new__(kind)  # its constructor refuses what tree_map may put there
        vars(mask).update(named | rest)
        return mask

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
    pairs = zip(captured.context.attributes, now.context.attributes, strict=True)
    for (name, before), (_, after) in pairs:
        if before == after:
            continue
        texts = [_text(value, with_lines=False) for value in (before, after)]
        if texts[0] == texts[1]:
            texts = [_text(value, with_lines=True) for value in (before, after)]
        differences.append((name, texts[0], texts[1]))
    return differences


def _flatten(mask: Any) -> tuple[list[Any], _Context]:
    values = [getattr(mask, name) for name in mask._TENSOR_ATTRS]
    attributes = [
        (name, _without_values(getattr(mask, name), values)) for name in mask._CONTEXT_ATTRS
    ]
    return values, _Context(tuple(attributes))


def _flatten_with_keys(mask: Any) -> tuple[list[tuple[Any, Any]], _Context]:
    values, context = _flatten(mask)
    names = [*mask._TENSOR_ATTRS]
    names += [f"_closure_{index}" for index in range(len(values) - len(names))]
    return list(zip(map(pytree.GetAttrKey, names), values, strict=True)), context


def _without_values(value: Any, values: list[Any], callers: tuple[Any, ...] = ()) -> Any:
    """The code of a function, whose values are added to the list; whatever else as it is.

    So is a function that calls itself, and each while Dynamo reads it, which finds cells by itself.
    """
    if not isinstance(value, _FUNCTIONS) or value in callers or torch.compiler.is_compiling():
        return value
    if isinstance(value, partial):
        held: Any = (value.func, value.args, value.keywords)
    else:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = (cells, value.__defaults__ or (), value.__kwdefaults__ or {})
    leaves, spec = pytree.tree_flatten(held)
    functions: list[Any] = []
    for leaf in leaves:
        is_function = isinstance(leaf, _FUNCTIONS)
        functions.append(_without_values(leaf, values, (*callers, value)) if is_function else None)
        if not is_function:
            values.append(leaf)
    code = None if isinstance(value, partial) else value.__code__
    return _Code(code=code, values=spec, functions=tuple(functions), made_from=value)


def _with_values(value: Any, values: Iterator[Any]) -> Any:
    return value.with_values(values) if isinstance(value, _Code) else value


def _text(value: Any, *, with_lines: bool) -> str:
    is_code = isinstance(value, _Code | StoredCode)
    return str(value.text(with_lines=with_lines)) if is_code else repr(value)[:200]
