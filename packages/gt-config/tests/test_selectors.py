"""MODULE_PATTERN::OP selectors."""

import pytest

from gt_config import SavedOpSelector
from gt_config.errors import SelectorSyntaxError


@pytest.mark.parametrize(
    ("text", "pattern", "op"),
    [
        ("layers.*.attention::aten.mm", "layers.*.attention", "aten.mm"),
        ("layers.0::aten.mm.default", "layers.0", "aten.mm.default"),
        ("*::gt._my_op2", "*", "gt._my_op2"),
        ("layers.*.w*::aten.mm", "layers.*.w*", "aten.mm"),
    ],
)
def test_parses_into_pattern_and_operator(text, pattern, op):
    selector = SavedOpSelector.parse(text)
    assert (selector.module_pattern, selector.op) == (pattern, op)
    assert str(selector) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "layers.*",
        "::aten.mm",
        "layers.*::",
        "layers.*::mm",
        "layers.*::aten.mm.default.more",
        "layers.*::aten::mm",
        "layers..0::aten.mm",
        "layers.0.::aten.mm",
        "layers.[0]::aten.mm",
        "layers.0 ::aten.mm",
        "layers.0::aten.mm\n",
    ],
)
def test_refuses_what_is_no_selector(text):
    with pytest.raises(SelectorSyntaxError) as error:
        SavedOpSelector.parse(text)
    assert str(error.value) == (
        f"{text!r} is not MODULE_PATTERN::OP, as 'layers.*.attention::aten.mm': dotted module name "
        "with * for one component, then namespace.name or namespace.name.overload"
    )


@pytest.mark.parametrize(
    ("selector", "module_fqn", "op"),
    [
        ("layers.*::aten.mm", "layers.3", "aten.mm.default"),
        ("layers.*::aten.mm", "layers.3.attention.wq", "aten.mm.out"),
        ("layers.*.w*::aten.mm.default", "layers.3.wq", "aten.mm.default"),
        ("layers.1::aten.mm", "layers.1", "aten.mm"),
    ],
)
def test_matches_a_module_and_what_lies_inside_it(selector, module_fqn, op):
    assert SavedOpSelector.parse(selector).matches(module_fqn=module_fqn, op=op)


@pytest.mark.parametrize(
    ("selector", "module_fqn", "op"),
    [
        ("layers.*::aten.mm", "layers", "aten.mm.default"),  # the container is not its entries
        ("layers.*::aten.mm", "mtp.layers.3", "aten.mm.default"),  # patterns begin at the root
        ("layers.1::aten.mm", "layers.10", "aten.mm.default"),
        ("layers.*.wq::aten.mm", "layers.3.attention.wq", "aten.mm.default"),  # * is one component
        ("layers.*::aten.mm", "layers.3", "aten.mm_.default"),
        ("layers.*::aten.mm.default", "layers.3", "aten.mm.out"),
        ("*::aten.mm", "", "aten.bmm.default"),
    ],
)
def test_does_not_match_a_neighbour(selector, module_fqn, op):
    assert not SavedOpSelector.parse(selector).matches(module_fqn=module_fqn, op=op)
