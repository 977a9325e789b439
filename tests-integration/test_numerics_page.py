"""The list of exceptions of bitwise equality has every pass that may change a bit."""

from pathlib import Path

from gt_passes.registry import find_passes, known_passes

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"


def test_every_pass_that_may_change_bits_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    changing = [each.name for each in find_passes(known_passes()) if each.numerics != "bitwise"]
    assert changing
    assert [name for name in changing if f"`{name}`" not in text] == []


def test_what_promises_numerics_links_to_the_page():
    root = PAGE.parents[1]
    promises = (
        "README.md",
        "docs/index.md",
        "docs/architecture.md",
        "docs/tutorials/train.md",
        *(f"packages/gt-{name}/README.md" for name in ("passes", "pipeline", "trainer")),
    )
    assert [
        name for name in promises if "numerics.md" not in (root / name).read_text(encoding="utf-8")
    ] == []
