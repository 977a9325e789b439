"""Each option of each operator, run on simulated ranks, gives the global result."""

from __future__ import annotations

from functools import cache

import pytest
from flex_attention_samples import flex_attention_samples
from operator_samples import SAMPLES
from simulated_ranks import Sample, wrong_options

from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.rules.registry import FAMILIES

ONE_AXIS = MeshShape(names=("a",), sizes=(2,))
OPERATORS = sorted(name for family in FAMILIES for name in family.RULES)
TWO_AXES = MeshShape(names=("a", "b"), sizes=(2, 2))


@cache
def _by_operator() -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for sample in (*SAMPLES, *flex_attention_samples()):
        for name in (sample.operator, sample.operator.rpartition(".")[0]):
            samples.setdefault(name, []).append(sample)
    return samples


def test_every_operator_with_a_rule_has_a_sample() -> None:
    assert sorted(set(OPERATORS) - set(_by_operator())) == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_option_of_one_axis_gives_the_global_result(operator: str) -> None:
    assert [
        problem
        for sample in _by_operator()[operator]
        for problem in wrong_options(sample, ONE_AXIS)
    ] == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_options_of_two_axes_give_the_global_result(operator: str) -> None:
    assert [
        problem
        for sample in _by_operator()[operator]
        for problem in wrong_options(sample, TWO_AXES, at_most=16)
    ] == []
