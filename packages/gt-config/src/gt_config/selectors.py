"""``MODULE_PATTERN::OP``: how a user points at the results of some operators in some modules.

Parsed here, where configurations are validated, and matched here too, so that what the error text
promises and what a memory policy does cannot drift apart. The pattern language is the one that
``ep_overlap.module_fqn`` already uses (``layers.*.moe``): an asterisk is one component of a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gt_config.errors import SelectorSyntaxError

MODULE_PATTERN_SYNTAX = "a dotted module name with * for one component, as 'layers.*.feed_forward'"
"""The syntax of the part before ``::`` in words, for error messages."""

SELECTOR_SYNTAX = (
    "MODULE_PATTERN::OP, as 'layers.*.attention::aten.mm': dotted module name with * for one "
    "component, then namespace.name or namespace.name.overload"
)
"""The syntax in words, for error messages."""

_COMPONENT = r"[A-Za-z0-9_*]+"
_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_MODULE_PATTERN = rf"{_COMPONENT}(?:\.{_COMPONENT})*"
_SELECTOR = re.compile(
    rf"(?P<module>{_MODULE_PATTERN})"
    r"::"
    rf"(?P<op>{_IDENTIFIER}\.{_IDENTIFIER}(?:\.{_IDENTIFIER})?)"
)


def is_module_pattern(text: str) -> bool:
    """Whether ``text`` is a dotted module name in which asterisks may stand in components."""
    return re.fullmatch(_MODULE_PATTERN, text) is not None


def is_inside(module_fqn: str, module_pattern: str) -> bool:
    """Whether a module is one that a pattern matches, or lies in one.

    Args:
        module_fqn: fully qualified name of the module.
        module_pattern: dotted module name; an asterisk stands for any characters within one
            component.
    """
    patterns = module_pattern.split(".")
    components = module_fqn.split(".")
    return len(components) >= len(patterns) and all(
        # The leading components decide; any further ones lie inside the matched module.
        fnmatchcase(component, pattern)
        for component, pattern in zip(components, patterns, strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOpSelector:
    """The operators that one selector picks."""

    module_pattern: str
    """Dotted module name; an asterisk stands for any characters within one component."""

    op: str
    """``namespace.name`` for every overload, or ``namespace.name.overload`` for one."""

    @classmethod
    def parse(cls, text: str) -> SavedOpSelector:
        """The selector written as ``text``.

        Raises:
            SelectorSyntaxError: the text is not ``MODULE_PATTERN::OP``.
        """
        match = _SELECTOR.fullmatch(text)
        if match is None:
            raise SelectorSyntaxError(f"{text!r} is not {SELECTOR_SYNTAX}")
        return cls(module_pattern=match["module"], op=match["op"])

    def matches(self, *, module_fqn: str, op: str) -> bool:
        """Whether an operator in a module is picked.

        Args:
            module_fqn: fully qualified name of the module in whose forward the operator ran.
                A module inside a matched one is matched as well.
            op: the operator with its overload, as ``aten.mm.default``.
        """
        inside = is_inside(module_fqn, self.module_pattern)
        return inside and (op == self.op or op.startswith(f"{self.op}."))

    def __str__(self) -> str:
        return f"{self.module_pattern}::{self.op}"
