"""What a run may demand of its products in 8 bits, with the exact text."""

from asked import found, only

from gt_config import CompileConfig, Violation


def test_products_may_be_required_in_8_bits():
    assert found(CompileConfig(require_float8=("layers.*", "lm_head"))) == ()


def test_what_keeps_every_bit_requires_no_8_bit_products():
    assert only(CompileConfig(require_float8=("layers.*",), bitwise=True)) == Violation(
        flag="--compile.require_float8",
        value=("layers.*",),
        allowed="() with --compile.bitwise: products in 8 bits are approximate",
        fix="drop one of the two",
    )


def test_required_modules_are_patterns():
    assert only(CompileConfig(require_float8=("layers.[0-3]", "layers.*"))) == Violation(
        flag="--compile.require_float8",
        value="layers.[0-3]",
        allowed="a dotted module name with * for one component, as 'layers.*.feed_forward'",
        fix="write it in that form",
    )
