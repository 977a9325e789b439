"""Rules of pass names, one by one, with the exact text."""

import pytest
from asked import KNOWN, found, only

from gt_config import CompileConfig, Violation


@pytest.mark.parametrize("field", ["passes", "disable_passes"])
def test_refuses_an_unknown_pass_and_suggests_near_ones(field):
    assert only(CompileConfig(**{field: ("remove-dead-codes",)})) == Violation(
        flag=f"--compile.{field}",
        value="remove-dead-codes",
        allowed="the registered passes: canonicalize-views, one-all-gather-chain, remove-dead-code",
        fix="did you mean 'remove-dead-code'?",
    )


def test_refuses_an_unknown_pass_that_resembles_none():
    assert only(CompileConfig(passes=("zzz",))).fix == "drop it"


def test_says_so_when_no_pass_is_registered():
    violation = only(CompileConfig(passes=("zzz",)), known_passes=())
    assert violation.allowed == "no pass is registered"


def test_refuses_a_pass_named_twice():
    config = CompileConfig(passes=("remove-dead-code", "remove-dead-code"))
    assert only(config) == Violation(
        flag="--compile.passes",
        value="remove-dead-code",
        allowed="each pass once",
        fix="name it once; it is named 2 times",
    )


def test_refuses_a_pass_both_asked_for_and_disabled():
    config = CompileConfig(passes=("remove-dead-code",), disable_passes=("remove-dead-code",))
    assert only(config) == Violation(
        flag="--compile.disable_passes",
        value="remove-dead-code",
        allowed="passes that --compile.passes does not name",
        fix="drop it from one of the two",
    )


def test_accepts_known_passes():
    assert found(CompileConfig(passes=KNOWN[:1], disable_passes=KNOWN[1:])) == ()
