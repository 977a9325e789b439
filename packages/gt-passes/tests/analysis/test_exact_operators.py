"""Which operators give a number the same bits alone as among others."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import capture

from gt_passes.analysis.exact_operators import EXACT_OPERATORS, is_exact

NUMBERS = torch.rand(67, generator=torch.Generator().manual_seed(0)) * 100 + 1e-6
CONSTANTS = {"clamp": (0.5, 70.0), "clamp_max": (70.0,), "clamp_min": (0.5,), "div": (3.0,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", sorted(EXACT_OPERATORS, key=str), ids=str)
def test_a_number_has_the_same_bits_alone_as_among_others(target, dtype):
    name = target._schema.name.removeprefix("aten::")
    constants = CONSTANTS.get(name, (0.1,) if name == "mul" else ())
    numbers = NUMBERS.to(dtype)
    alone = torch.stack([target(number.clone(), *constants) for number in numbers])
    assert torch.equal(alone, target(numbers, *constants))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: x * 3, True),
        (lambda x, y: x.double(), True),
        (lambda x, y: x.clamp(min=0.5), True),
        (lambda x, y: x * y, False),
        (lambda x, y: x * x, False),
        (lambda x, y: x.exp2(), False),
        (lambda x, y: x + 1, False),
        (lambda x, y: torch.pow(2.0, x), False),
        (lambda x, y: torch.rand_like(x), False),
    ],
)
def test_only_exact_arithmetic_with_constants_is(function, expected):
    *_, node, _ = capture(function, NUMBERS, NUMBERS).graph.nodes
    assert is_exact(node) is expected
