"""docs/hugging-face-families.md is what this transformers does."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hugging_face_families import FAMILIES, PAGE, judge, judge_all, page  # noqa: E402  # needs it


def test_a_family_that_installs_hooks_in_its_first_call_is_captured():
    assert judge("qwen2_moe").is_bitwise


@pytest.mark.slow
def test_the_page_is_what_is_found():
    found = judge_all()
    assert len(FAMILIES) >= 20
    assert sum(each.is_bitwise for each in found.values()) >= len(FAMILIES) - 1
    versions = (
        f"transformers {transformers.__version__}",
        f"torch {torch.__version__.split('+')[0]}",
    )
    if all(version in PAGE.read_text(encoding="utf-8") for version in versions):
        assert PAGE.read_text(encoding="utf-8") == page(found), "run the tool again"
