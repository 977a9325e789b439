"""Random number generators of PyTorch, Python and NumPy: their states, read and restored."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gt_trace._torch_internals import generator_address


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGenerator:
    """A generator of PyTorch, Python or NumPy, and its name in messages."""

    name: str
    generator: Any

    @property
    def key(self) -> int:
        """A number that every Python object for the same generator has."""
        held = self.generator
        return generator_address(held) if isinstance(held, torch.Generator) else id(held)

    @property
    def state(self) -> Any:
        """A copy of the state: a tensor, a tuple or bytes."""
        held = self.generator
        if isinstance(held, torch.Generator):
            return held.get_state()
        if isinstance(held, random.Random):
            return held.getstate()
        return pickle.dumps(_numpy_state_of(held))

    def restore(self, state: Any) -> None:
        """Set the state that ``state`` had returned."""
        held = self.generator
        if isinstance(held, torch.Generator):
            held.set_state(state)
        elif isinstance(held, random.Random):
            held.setstate(state)
        elif hasattr(held, "set_state"):
            held.set_state(pickle.loads(state))
        else:
            getattr(held, "bit_generator", held).state = pickle.loads(state)

    def advance(self) -> None:
        """Move to another state, as a draw does."""
        held = self.generator
        if not isinstance(held, torch.Generator):
            draw = getattr(held, "random", None) or held.random_raw
            draw()
        elif held.device.type == "cpu":
            torch.empty(1, device="cpu").uniform_(generator=held)
        else:  # a counter: no kernel runs
            held.set_offset(held.get_offset() + 4)


def ambient_generators() -> Iterator[HeldGenerator]:
    """Yield the generators of PyTorch, Python and NumPy that code draws from by default."""
    yield HeldGenerator(name="PyTorch's generator", generator=torch.default_generator)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            for generator in backend.default_generators:
                name = f"PyTorch's generator of {generator.device}"
                yield HeldGenerator(name=name, generator=generator)
    python: Any = random.getstate
    yield HeldGenerator(name="Python's generator (random)", generator=python.__self__)
    if numpy := sys.modules.get("numpy"):
        name = "NumPy's generator (numpy.random)"
        yield HeldGenerator(name=name, generator=numpy.random.get_state.__self__)


def _numpy_state_of(generator: Any) -> Any:
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def generator_types() -> tuple[type, ...]:
    """Return the classes of generators that were imported so far."""
    kinds: list[type] = [torch.Generator, random.Random]
    if numpy := sys.modules.get("numpy"):
        names = ("Generator", "RandomState", "BitGenerator")
        kinds += [getattr(numpy.random, name) for name in names]
    return tuple(kinds)
