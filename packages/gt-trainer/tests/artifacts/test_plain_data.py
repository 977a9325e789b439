"""Plain data tell apart what computes otherwise, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gt_config.errors import FingerprintTypeError
from gt_trace.capture.code_digest import code_digest
from gt_trace.context_parallel import SequenceAxis
from gt_trainer.artifacts.plain_data import folded, plain_data, tensor_text


def plain(value: object) -> Any:
    return plain_data(value, path="value")


@dataclass
class Norm:
    eps: float = 1e-5
    steps: int = 3
    cache: object = field(default=None, compare=False)


def scaled(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


def shifted(factor: float) -> Callable[[float], float]:
    return lambda x: x + factor


def test_dataclasses_are_their_fields_but_for_what_equality_or_the_caller_leaves_out():
    assert plain(Norm(cache=object())) == {
        "class": f"{__name__}.Norm",
        "eps": 1e-5,
        "steps": 3,
    }
    assert "steps" not in plain_data([Norm()], path="value", leave_out={"steps"})[0]


def test_the_axis_of_a_shared_sequence_is_the_same_on_all_its_ranks():
    first, second, longer = (
        SequenceAxis(name="cp", group_name=name, num_ranks=num_ranks, rank=rank)
        for name, num_ranks, rank in (("3", 2, 0), ("4", 2, 1), ("3", 4, 0))
    )
    assert plain(first) == plain(second)
    assert plain(first) != plain(longer)


def test_functions_differ_by_their_code_and_by_what_they_close_over():
    assert plain(scaled(2.0)) == plain(scaled(2.0))
    assert plain(scaled(2.0)) != plain(scaled(3.0))
    assert plain(scaled(2.0)) != plain(shifted(2.0))
    assert plain(functools.partial(scaled, 2.0)) != plain(functools.partial(scaled, 3.0))


def test_the_code_of_a_function_does_not_depend_on_where_it_is_written():
    source = "def f(x):\n    return x in {1, 'a', None}\n"
    digests = set()
    for text, name in ((source, "one"), ("\n\n\n" + source, "other")):
        scope: dict[str, Any] = {}
        exec(compile(text, name, "exec"), scope)
        digests.add(code_digest(scope["f"].__code__))
    assert len(digests) == 1


def test_a_function_that_calls_itself_has_an_end():
    def count(n: int) -> int:
        return 0 if n == 0 else count(n - 1)

    assert plain(count)["cells"] == ["what this is inside of"]


def test_equal_neighbours_stand_once_with_their_number():
    layers = [Norm(), Norm(), Norm(eps=1.0)]
    assert [each["count"] for each in plain(layers)] == [2, 1]
    assert plain([1, 2, 3]) == [1, 2, 3]
    assert plain(layers) != plain([*layers, Norm(eps=1.0)])


def test_sets_have_no_order():
    assert plain({"a", "b"}) == plain({"b", "a"})


@pytest.mark.parametrize("value", [object(), [object()], {"a": {1: object()}}, Norm(eps=object())])
def test_what_nothing_tells_apart_is_refused_by_its_path(value: object):
    with pytest.raises(FingerprintTypeError, match=r"^value.* is of type builtins.object"):
        plain(value)


def test_a_tensor_is_a_line_without_its_values():
    ones, zeros = torch.ones(2, 3), torch.zeros(2, 3)
    assert tensor_text(ones) == tensor_text(zeros) == "torch.float32[2, 3] on cpu, strides [3, 1]"
    texts = {
        tensor_text(each)
        for each in (ones, ones.t(), ones.half(), ones[:1], ones.clone().requires_grad_())
    }
    assert len(texts) == 5


def test_names_of_layers_are_folded_and_nothing_is_lost():
    named = {"norm": "a", "layers.0.w": "b", "layers.1.w": "b", "layers.2.w": "c", "x.3.y.4": "d"}
    assert folded(named) == {
        "norm": "a",
        "layers.*.w": "0-1: b; 2: c",
        "x.*.y.*": "3.4: d",
    }
    swapped = {**named, "layers.1.w": "c", "layers.2.w": "b"}
    assert folded(swapped)["layers.*.w"] == "0, 2: b; 1: c"
    of_experts = {f"layers.{n}.w": "b" for n in (0, 1, 2, 4, 6, 8)}
    assert folded(of_experts)["layers.*.w"] == "0-2, 4-8 by 2: b"


class Dispatcher:
    def __init__(self, **held: object) -> None:
        vars(self).update(held)


def test_any_object_is_its_class_and_attributes_where_it_may_be():
    with pytest.raises(FingerprintTypeError, match="Dispatcher, and nothing says in what two"):
        plain_data(Dispatcher(top_k=2), path="experts")

    def of(value: object) -> object:
        return plain_data(value, path="experts", takes_any_object=True)

    assert of(Dispatcher(top_k=2)) == of(Dispatcher(top_k=2)) != of(Dispatcher(top_k=3))
    inner = Dispatcher(inside=Dispatcher(top_k=2))
    assert of(inner) != of(Dispatcher(inside=Dispatcher(top_k=3)))
    deeper = of(Dispatcher(inside=inner))
    assert deeper == of(Dispatcher(inside=Dispatcher(inside=Dispatcher(top_k=3))))
    lock = torch.Generator()  # PyTorch's own: what it holds is of this process
    assert of(lock) == {"class": "torch._C.Generator"}
    knot = Dispatcher()
    knot.itself = knot
    assert of(knot) == of(knot)


def test_a_name_that_stands_for_nothing_yet_is_no_error():
    def outer() -> object:
        def inner() -> object:
            return later

        found = plain_data(inner, path="f")
        later = 1
        return found, later

    found, _ = outer()
    assert found["cells"] == ["nothing yet"]


def test_tensors_on_meta_stand_for_those_of_a_device():
    tensor = torch.zeros(2)
    meta = tensor.to("meta")
    assert plain_data([meta], path="x", meta_device="cpu") == plain_data([tensor], path="x")
    assert plain_data([meta], path="x") != plain_data([tensor], path="x")
