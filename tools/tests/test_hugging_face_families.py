"""docs/hugging-face-families.md is what this transformers does."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hugging_face_families import (  # noqa: E402  # needs it
    FAMILIES,
    PAGE,
    judge,
    judge_all,
    judge_other,
    page,
)
from hugging_face_inputs import OTHER_KINDS  # noqa: E402  # needs it


def test_a_family_that_installs_hooks_in_its_first_call_is_captured():
    assert judge("qwen2_moe").is_bitwise


@pytest.mark.slow
def test_the_page_is_what_is_found():
    found, others = judge_all()
    assert len(FAMILIES) >= 28
    assert len(OTHER_KINDS) >= 12
    assert all(each.is_bitwise for each in found.values())
    for family, each in others.items():
        if (reason := OTHER_KINDS[family].refused_because) is None:
            assert each.is_bitwise, family
        else:
            assert reason in str(each.reason), family
    versions = (
        f"transformers {transformers.__version__}",
        f"torch {torch.__version__.split('+')[0]}",
    )
    if all(version in PAGE.read_text(encoding="utf-8") for version in versions):
        assert PAGE.read_text(encoding="utf-8") == page(found, others), "run the tool again"


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHER_KINDS)
def test_a_model_of_another_kind_is_bitwise_or_refused_with_its_reason(family):
    found, reason = judge_other(family), OTHER_KINDS[family].refused_because
    assert found.is_bitwise if reason is None else reason in str(found.reason)
