"""Renamed expressions are those that SymPy would have made of the new symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gt_trace._torch_internals import ShapeEnv, sympy_of_torch
from gt_trace.stamping.known_sizes import Renaming

sympy = sympy_of_torch()

EXPRESSIONS: dict[str, Callable[[list[Any]], Any]] = {
    "number": lambda _: sympy.Integer(3),
    "symbol": lambda u: u[0],
    "sum": lambda u: sum(u) + 5,
    "product": lambda u: 7168 * u[0] * u[1],
    "multiple of a sum": lambda u: sympy.Mul(2, sum(u)),
    "quotient": lambda u: (u[0] + u[1]) // 4,
    "remainder": lambda u: sympy.Mod(sum(u), 8),
    "least": lambda u: sympy.Min(u[0], u[1]),
    "greater": lambda u: sympy.Gt(sum(u), 4096),
    "at least": lambda u: u[0] >= 0,
    "equal": lambda u: sympy.Eq(u[0] + u[1] + u[2], u[3] + u[4]),
    "unequal": lambda u: sympy.Ne(sum(u[:2]), u[3]),
    "both": lambda u: sympy.And(u[0] > 2, sympy.Or(u[1] < u[2], u[3] >= u[4])),
}


def symbols(count: int) -> list[Any]:
    """As a shape environment makes them; ``u9`` and ``u10`` are among them."""
    env: Any = ShapeEnv()
    with env.ignore_fresh_unbacked_symbols():
        return [env.create_unbacked_symint().node.expr for _ in range(count)]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_renamed_expression_is_what_xreplace_gives(name: str) -> None:
    made = symbols(12)
    ours, theirs = made[:6], made[6:]
    names = dict(zip(ours, theirs, strict=True))
    expression = EXPRESSIONS[name](ours)
    renamed = Renaming(names)(expression)
    assert renamed == expression.xreplace(names)
    assert hash(renamed) == hash(expression.xreplace(names))
    assert renamed == EXPRESSIONS[name](theirs)


def test_symbols_without_another_name_stay() -> None:
    first, second, other = symbols(3)
    assert Renaming({first: second})(first + other > 2) == (second + other > 2)
    assert Renaming({first: second})(other + 1) == other + 1
