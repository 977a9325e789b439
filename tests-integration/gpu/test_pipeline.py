"""Two stages on one rank compute what eager autograd does."""

from __future__ import annotations

from gpu import pipeline_cases
from gpu.sites import Site


def test_two_stages_on_one_rank_are_eager_to_the_bit(site: Site) -> None:
    step = pipeline_cases.two_stages_on_one_rank(site)
    assert step.losses_equal == [True] * 4
    assert len(step.gradients_equal) == 17
    assert [name for name, equal in step.gradients_equal.items() if not equal] == []


def test_a_pipeline_whose_actions_are_replayed_is_eager_to_the_bit(site: Site) -> None:
    step = pipeline_cases.two_stages_on_one_rank(site, num_steps=4, records=True)
    assert step.losses_equal == [True] * 4
    assert [name for name, equal in step.gradients_equal.items() if not equal] == []
