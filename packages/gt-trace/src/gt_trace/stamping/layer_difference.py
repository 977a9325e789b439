"""Whether two layers are built alike: the first gate before stamping.

Everything that a forward could read is compared: classes, parameters and buffers with their
placement, every attribute with its containers, hooks, wrapped methods with what they close over.
Objects are compared by what they hold where their whole state is Python's; any other object must be
the very same one. What lies in a layer's own tree is compared by its place there, and names that
contain the layer's index by the distance to it.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gt_trace._torch_internals import DTensorSpec, tensor_hooks
from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trace.stamping.layer_list import LayerList

_HEAP_TYPE = 1 << 9
"""The flag Py_TPFLAGS_HEAPTYPE of a class: classes that Python statements made have it."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_NOT_READ_BY_A_FORWARD = frozenset(
    {
        "_modules",
        "_parameters",
        "_buffers",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        *_HOOKS,
        *_HOOK_FLAGS,
    }
)
_MOST_CLASSES = 1024
_BY_VALUE = (
    bool,
    int,
    complex,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
    range,
    slice,
    torch.finfo,
    torch.iinfo,
)


def layer_difference(
    layers: LayerList, first: int, second: int, *, ignored_attributes: frozenset[str] = frozenset()
) -> str | None:
    """What differs between two layers, or None.

    Returns:
        A phrase as ``layers.3.attention.scale is 0.5, and 0.25 in layers.2``.
    """
    return LayerComparison(
        layers=layers, first=first, second=second, ignored_attributes=ignored_attributes
    ).modules()


@dataclass(slots=True, kw_only=True)
class LayerComparison:
    """Compares what belongs to one layer with what belongs to another."""

    layers: LayerList
    first: int
    second: int
    ignored_attributes: frozenset[str] = frozenset()
    relative_names: bool = True
    """Whether names that differ in the layer's own index are alike."""

    _places: tuple[dict[int, str], dict[int, str]] | None = field(default=None, init=False)
    _seen: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict, init=False)

    def modules(self) -> str | None:
        """The first difference between the modules themselves."""
        ours = dict(self.layers.layers[self.first].named_modules(remove_duplicate=False))
        theirs = dict(self.layers.layers[self.second].named_modules(remove_duplicate=False))
        if list(ours) != list(theirs):
            only = [name for name in ours if name not in theirs] or [
                name for name in theirs if name not in ours
            ]
            what = f"other submodules, as {only[0]}" if only else "its submodules in another order"
            names = self.layers.name(self.second), self.layers.name(self.first)
            return f"{names[0]} has {what}, than {names[1]}"
        return _first(
            self._module(f".{name}" if name else "", module, theirs[name])
            for name, module in ours.items()
        )

    def value(self, path: str, ours: Any, theirs: Any) -> str | None:
        """The first difference between two values that the layers hold at ``path``."""
        if isinstance(ours, str):
            if isinstance(theirs, str) and self._relative(ours, self.first) == self._relative(
                theirs, self.second
            ):
                return None
            return self._differ(path, ours, theirs)
        if ours is theirs:
            # Shared by both, hence no difference; what a shared object does in each, the streams
            # of operators tell.
            return None
        if type(ours) is not type(theirs):
            return self._differ(path, type(ours).__name__, type(theirs).__name__)
        if isinstance(ours, float):
            return None if ours.hex() == theirs.hex() else self._differ(path, ours, theirs)
        if isinstance(ours, _BY_VALUE):
            return None if ours == theirs else self._differ(path, ours, theirs)
        key = (id(ours), id(theirs))
        if key in self._seen:
            return None
        # Held, so that no other object gets the same id while this comparison lasts.
        self._seen[key] = (ours, theirs)
        return self._object(path, ours, theirs)

    def _object(self, path: str, ours: Any, theirs: Any) -> str | None:
        if isinstance(ours, list | tuple):
            items = self._sequence(path, ours, theirs)
            return items or self._mapping(path, _state(ours), _state(theirs))
        if isinstance(ours, Mapping):
            items = self._mapping(path, ours, theirs)
            return items or self._mapping(path, _state(ours), _state(theirs))
        if isinstance(ours, set | frozenset | DeviceMesh):
            return None if ours == theirs else self._differ(path, ours, theirs)
        if isinstance(ours, nn.Module):
            places = self._module_places()
            if places[0].get(id(ours), id(ours)) == places[1].get(id(theirs), id(theirs)):
                return None
            return self._unknown(path, ours)
        if isinstance(ours, torch.Tensor):
            return self._unknown(path, ours)
        if isinstance(ours, weakref.ref):
            return self.value(path, ours(), theirs())
        if isinstance(ours, functools.partial):
            return self.value(
                path,
                (ours.func, ours.args, ours.keywords),
                (theirs.func, theirs.args, theirs.keywords),
            )
        if isinstance(ours, types.MethodType):
            return self.value(path, ours.__func__, theirs.__func__) or self.value(
                f"{path}.__self__", ours.__self__, theirs.__self__
            )
        if isinstance(ours, types.FunctionType):
            return self._function(path, ours, theirs)
        if isinstance(ours, types.CellType):
            return self.value(path, cell_contents(ours), cell_contents(theirs))
        kind: Any = type(ours)
        if _is_plain_python(kind):
            return self._mapping(path, _state(ours), _state(theirs))
        return self._unknown(path, ours)

    def _module(self, path: str, ours: nn.Module, theirs: nn.Module) -> str | None:
        if ours is theirs:
            return None
        if type(ours) is not type(theirs):
            return self._differ(path, type(ours).__qualname__, type(theirs).__qualname__)
        skipped = _NOT_READ_BY_A_FORWARD | self.ignored_attributes
        attributes = [
            {name: held for name, held in vars(each).items() if name not in skipped}
            for each in (ours, theirs)
        ]
        return (
            self._tensors(path, ours._parameters, theirs._parameters)
            or self._tensors(path, ours._buffers, theirs._buffers)
            or _first(
                self.value(f"{path} {name}", _hooks(ours, name), _hooks(theirs, name))
                for name in _HOOKS
            )
            or self._mapping(path, *attributes)
        )

    def _tensors(
        self,
        path: str,
        ours: Mapping[str, torch.Tensor | None],
        theirs: Mapping[str, torch.Tensor | None],
    ) -> str | None:
        if list(ours) != list(theirs):
            return self._differ(path, list(ours), list(theirs))
        return _first(
            self._tensor(f"{path}.{name}", one, theirs[name]) for name, one in ours.items()
        )

    def _tensor(
        self, path: str, ours: torch.Tensor | None, theirs: torch.Tensor | None
    ) -> str | None:
        if ours is theirs:
            return None
        if ours is None or theirs is None:
            return self._differ(path, type(ours).__name__, type(theirs).__name__)
        for what, get in _TENSOR_FACTS.items():
            if get(ours) != get(theirs):
                return self._differ(f"{path} {what}", get(ours), get(theirs))
        return self.value(
            f"{path} hooks", tensor_hooks(ours), tensor_hooks(theirs)
        ) or self._mapping(path, _tensor_state(ours), _tensor_state(theirs))

    def _sequence(self, path: str, ours: Any, theirs: Any) -> str | None:
        if len(ours) != len(theirs):
            return self._differ(f"{path} length", len(ours), len(theirs))
        return _first(
            self.value(f"{path}[{index}]", one, other)
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True))
            if not self._are_one(one, other)
        )

    def _mapping(self, path: str, ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> str | None:
        if len(ours) != len(theirs):
            more, less = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
            what = f"with {sorted(map(str, set(more) - set(less)))}", "without"
            return self._differ(path, *(what if more is ours else reversed(what)))
        # In order: iterating over a dictionary is part of what a forward may do.
        return _first(
            self.value(f"{path} key", key, other_key) or self.value(f"{path}.{key}", one, other)
            for (key, one), (other_key, other) in zip(ours.items(), theirs.items(), strict=True)
            if not (self._are_one(key, other_key) and self._are_one(one, other))
        )

    def _function(self, path: str, ours: Any, theirs: Any) -> str | None:
        if ours.__code__ != theirs.__code__ or ours.__globals__ is not theirs.__globals__:
            return self._differ(path, ours.__qualname__, f"another {theirs.__qualname__}")
        return _first(
            self.value(f"{path}.{name}", getattr(ours, name), getattr(theirs, name))
            for name in ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")
        )

    def _are_one(self, ours: Any, theirs: Any) -> bool:
        """Whether both are one object that is no difference, or one text without an index."""
        if type(ours) is str:
            return ours == theirs and self.layers.fqn not in ours
        return ours is theirs

    def _relative(self, text: str, own: int) -> str:
        """Indices of the list in ``text`` as distances to ``own``."""
        if not self.relative_names or self.layers.fqn not in text:
            return text
        return self.layers.pattern().sub(
            lambda match: f"{self.layers.fqn}.{int(match[1]) - own:+d}", text
        )

    def _module_places(self) -> tuple[dict[int, str], dict[int, str]]:
        if self._places is None:
            ours, theirs = (
                {id(m): name for name, m in self.layers.layers[index].named_modules()}
                for index in (self.first, self.second)
            )
            self._places = (ours, theirs)
        return self._places

    def _differ(self, path: str, ours: object, theirs: object) -> str:
        where = f"{self.layers.name(self.second)}{path}"
        if path and not path.startswith((".", " ")):
            where = f"{self.layers.name(self.second)} {path}"
        return f"{where} is {_short(theirs)}, and {_short(ours)} in {self.layers.name(self.first)}"

    def _unknown(self, path: str, value: object) -> str:
        return (
            f"{self.layers.name(self.second)}{path} is a {type(value).__name__} of its own, which "
            f"cannot be compared with the one of {self.layers.name(self.first)}"
        )


def _first(differences: Iterator[str | None]) -> str | None:
    return next(filter(None, differences), None)


_TENSOR_FACTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "kind": type,
    "shape": lambda tensor: tuple(tensor.shape),
    "stride": lambda tensor: tuple(tensor.stride()),
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "layout": lambda tensor: flatten_tensor(tensor)[1],
    "local shape": lambda tensor: [tuple(leaf.shape) for leaf in flatten_tensor(tensor)[0]],
}


def _hooks(module: nn.Module, name: str) -> list[tuple[Any, tuple[bool, ...]]]:
    """Hooks in order; their keys are numbers that no two modules share."""
    flags = [getattr(module, flag) for flag in _HOOK_FLAGS]
    return [
        (hook, tuple(key in flag for flag in flags)) for key, hook in getattr(module, name).items()
    ]


def _tensor_state(tensor: torch.Tensor) -> dict[str, Any]:
    """What Python hung on a tensor, beside hooks and what makes up a subclass."""
    held: dict[str, Any] = getattr(tensor, "__dict__", {})
    inner = {name for name, _ in flatten_tensor(tensor)[1].attributes}
    own = {"_backward_hooks", "_post_accumulate_grad_hooks", "_spec", *inner}
    return {name: value for name, value in held.items() if name not in own}


def cell_contents(cell: types.CellType) -> Any:
    """What a cell of a closure holds; None before anything was put in it."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _is_plain_python(kind: type) -> bool:
    """Whether all that an object of that class holds is in its dictionary and its slots."""
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__) and (
        hasattr(kind, "__dict__")
        and any("__dict__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__)
    )


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names.extend((slots,) if isinstance(slots, str) else slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _state(value: Any) -> dict[str, Any]:
    state: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    kind: Any = type(value)
    for name in _slots(kind):
        if hasattr(value, name):
            state[name] = getattr(value, name)
    if isinstance(value, DTensorSpec):
        state.pop("_hash", None)  # of what it holds, once somebody asked for it
    return state


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
