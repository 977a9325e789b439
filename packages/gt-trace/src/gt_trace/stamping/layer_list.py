"""The list of a model's repeated blocks, and what of the model's names belongs to which block."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from gt_trace._torch_internals import has_backward_hooks
from gt_trace.capture.module_state import StateSlot
from gt_trace.stamping.report import NotStampable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """An ``nn.ModuleList``, or an ``nn.ModuleDict`` with the keys "0", "1", ..., inside a model."""

    fqn: str
    """Fully qualified name of the container, as ``layers`` or ``model.layers``."""

    container: nn.ModuleList | nn.ModuleDict
    layers: tuple[nn.Module, ...]
    first: int = 0
    """The number in the first layer's name: a pipeline stage holds layers from the middle. Layers
    are counted from 0 all the same."""

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def name(self, index: int) -> str:
        """Fully qualified name of one layer."""
        return f"{self.fqn}.{self.first + index}"

    def pattern(self) -> re.Pattern[str]:
        """Matches the container's name with an index, anywhere in a longer name or sentence."""
        return _pattern(self.fqn)

    def index_of(self, name: str) -> int | None:
        """Which layer a fully qualified name lies in; None for outside of the list."""
        return self.split(name)[0]

    def split(self, name: str) -> tuple[int | None, str]:
        """A name as the layer that it lies in and the rest; outside of the list None and itself."""
        prefix = f"{self.fqn}."
        digits = name[len(prefix) :].partition(".")[0] if name.startswith(prefix) else ""
        if not digits.isdigit():
            return None, name
        return int(digits) - self.first, name[len(prefix) + len(digits) :]

    def shifted(self, value: Any, distance: int) -> Any:
        """``value`` with every index of the list in its texts moved by ``distance`` layers."""
        if isinstance(value, str):
            if self.fqn not in value:
                return value
            return self.pattern().sub(lambda found: f"{self.fqn}.{int(found[1]) + distance}", value)
        if isinstance(value, Mapping):
            return {key: self.shifted(each, distance) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.shifted(each, distance) for each in value)
        return value

    @contextmanager
    def shortened(self, keep: Sequence[int]) -> Iterator[None]:
        """Inside, the container holds only the layers ``keep``, under their own names."""
        modules = self.container._modules
        everything = dict(modules)
        try:
            for key in everything:
                if int(key) - self.first not in keep:
                    del modules[key]
            yield
        finally:
            modules.clear()
            modules.update(everything)


@functools.cache
def _pattern(fqn: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.]){re.escape(fqn)}\.(\d+)(?!\w)")


def find_layer_list(model: nn.Module) -> LayerList:
    """The longest list of blocks in ``model``; of equally long ones the first.

    A list inside of another's blocks repeats with them, and does not count.

    Raises:
        NotStampable: the model has none.
    """
    best: LayerList | None = None
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        first = _first_number(module)
        if first is None:
            continue
        if best is not None and best.index_of(fqn) is not None:
            continue
        held: dict[str, nn.Module | None] = dict(module._modules)
        layers = tuple(layer for layer in held.values() if layer is not None)
        if len(layers) == len(module) and (best is None or len(layers) > len(best)):
            best = LayerList(fqn=fqn, container=module, layers=layers, first=first)
    if best is None:
        raise NotStampable("the model has no ModuleList or numbered ModuleDict of layers")
    if len({id(layer) for layer in best.layers}) < len(best):
        raise NotStampable(f"{best.fqn} holds the same module several times")
    return best


def _first_number(module: nn.ModuleList | nn.ModuleDict) -> int | None:
    """The number that keys count up from; None if they do not."""
    keys = list(module._modules)
    if not keys or not keys[0].isdecimal():
        return None
    first = int(keys[0])
    return first if keys == [str(first + index) for index in range(len(keys))] else None


def refuse_backward_hooks(layers: LayerList) -> None:
    """Refuse layers with hooks that run in the backward, of which no gate sees anything.

    Raises:
        NotStampable: names the module.
    """
    for index, layer in enumerate(layers.layers):
        for name, module in layer.named_modules():
            if has_backward_hooks(module):
                where = f"{layers.name(index)}.{name}" if name else layers.name(index)
                raise NotStampable(f"{where} has backward hooks, which may tell layers apart")


def refuse_shared_weights(layers: LayerList, slots: Sequence[StateSlot]) -> None:
    """Refuse state that some layers share with each other or with the rest of the model.

    Buffers that nothing differentiates and that *all* layers hold alike, as a table of rotary
    embeddings, are no difference between layers.

    Raises:
        NotStampable: names the tensor.
    """
    for slot in slots:
        places = [layers.split(name) for name in slot.entry.names]
        if len({owner for owner, _ in places}) == 1:
            continue
        per_layer: dict[int, set[str]] = {index: set() for index in range(len(layers))}
        for owner, name in places:
            if owner is not None:
                per_layer[owner].add(name)
        uniform = len({frozenset(names) for names in per_layer.values()}) == 1
        if slot.tensor.requires_grad or not uniform:
            raise NotStampable(
                f"{slot.entry.name} is shared: it is also {', '.join(slot.entry.names[1:4])}"
            )
