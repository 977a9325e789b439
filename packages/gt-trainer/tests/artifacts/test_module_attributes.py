"""A graph that holds a value of a module's attribute as a constant is not taken for another's."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from gt_trainer.artifacts.run_identity import attribute_texts


class Slotted:
    __slots__ = ("never_set", "scale")

    def __init__(self, scale: object) -> None:
        self.scale = scale


class OneSlot:
    __slots__ = "scale"

    def __init__(self, scale: object) -> None:
        self.scale = scale


class PrivateSlot:
    __slots__ = iter(["__scale"])  # which is at its end once the class is made

    def __init__(self, scale: object) -> None:
        self.__scale = scale


class SlotOfABase(Slotted):
    """Has a ``__dict__`` as well."""


class NoSlotOfItsOwn(OneSlot):
    __slots__ = ()


class Terse(float):
    def __repr__(self) -> str:
        return "a scale"


class Held:
    def __init__(self, scale: object) -> None:
        self.scale = scale


def closed_over(scale: torch.Tensor) -> Any:
    return lambda x: x * scale


def text_of(value: object, name: str = "scaling") -> str:
    module = nn.Linear(2, 2)
    setattr(module, name, value)
    return texts_of(module)[name]


def texts_of(module: nn.Module) -> dict[str, str]:
    return dict(attribute_texts(module, leave_out=set(), meta_device="cpu"))


PAIRS: dict[str, tuple[object, object]] = {
    "np.float64": (np.float64(0.5), np.float64(0.25)),
    "np.float32": (np.float32(0.5), np.float32(0.25)),
    "type of a number": (np.float64(0.5), 0.5),
    "subclass of float": (Terse(0.5), Terse(0.25)),
    "np.dtype": (np.dtype("float32"), np.dtype("float64")),
    "np.ndarray": (np.array([1.0]), np.array([2.0])),
    "sizes of an array": (np.zeros((2, 3)), np.zeros((3, 2))),
    "elements of an array": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "array of objects": (np.array([{"a": 1}]), np.array([{"a": 2}])),
    "complex": (complex(1), complex(2)),
    "bool": (True, 1),
    "bytes": (b"a", b"b"),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "range": (range(3), range(4)),
    "slice": (slice(1), slice(2)),
    "slice of objects": (slice(Held(1)), slice(Held(2))),
    "deque": (deque([1]), deque([2])),
    "Fraction": (Fraction(1, 2), Fraction(1, 3)),
    "path": (PurePosixPath("a"), PurePosixPath("b")),
    "slots": (Slotted(1), Slotted(2)),
    "one slot": (OneSlot(1), OneSlot(2)),
    "private slot": (PrivateSlot(1), PrivateSlot(2)),
    "slot of a base, with attributes": (SlotOfABase(1), SlotOfABase(2)),
    "slot of a base alone": (NoSlotOfItsOwn(1), NoSlotOfItsOwn(2)),
    "tensor": (torch.tensor(0.5), torch.tensor(0.25)),
    "bfloat16": (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
    "complex tensor": (torch.tensor(1j), torch.tensor(1j).conj()),
    "transposed tensor": (torch.eye(2).cumsum(0).t(), torch.eye(2).cumsum(1).t()),
    "sparse tensor": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "no elements": (torch.empty(0, 2), torch.empty(0, 3)),
    "tensor in a list": ([torch.tensor(0.5)], [torch.tensor(0.25)]),
    "tensor of an object": (Held(torch.tensor(0.5)), Held(torch.tensor(0.25))),
    "tensor closed over": (closed_over(torch.tensor(0.5)), closed_over(torch.tensor(0.25))),
    "requires grad": (torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_values_that_differ_have_texts_that_differ(one: object, other: object):
    assert text_of(one) != text_of(other)


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (np.array([1.0, 2.0]), np.array([1.0, 2.0])),
        (np.array([{"a": 1}]), np.array([{"a": 1}])),
        (Slotted(np.float32(1)), Slotted(np.float32(1))),
        (SlotOfABase(b"a"), SlotOfABase(b"a")),
        (torch.tensor([0.5]), torch.tensor([0.5])),
        (torch.arange(4)[::2], torch.arange(4)[::2].clone().repeat_interleave(2)[::2]),
    ],
    ids=["array", "array of objects", "slots", "slots and attributes", "tensor", "strides"],
)
def test_equal_values_of_two_objects_have_one_text(one: object, same: object):
    assert text_of(one) == text_of(same)


def test_attributes_beside_slots_count():
    one, other = SlotOfABase(1), SlotOfABase(1)
    vars(other)["bias"] = 2
    assert text_of(one) != text_of(other)


def test_values_of_parameters_and_buffers_do_not_count():
    def texts(fill: float) -> dict[str, str]:
        module = nn.BatchNorm1d(2)
        nn.init.constant_(module.weight, fill)
        assert module.running_mean is not None
        module.running_mean.fill_(fill)
        module.held = [module.weight, module.running_mean]
        return texts_of(module)

    assert texts(1.0) == texts(2.0)


def test_a_tensor_without_values_is_told_without_them():
    with FakeTensorMode():
        fake = torch.zeros(2)
    assert text_of(fake) != text_of(torch.zeros(2))
    meta = text_of(torch.zeros(2, device="meta"))
    assert meta == text_of(torch.ones(2, device="meta")) != text_of(torch.zeros(2))


def test_what_this_project_notes_is_left_out():
    module = nn.Linear(2, 2)
    module._gt_note = torch.ones(2)
    assert not [name for name in texts_of(module) if "note" in name]
