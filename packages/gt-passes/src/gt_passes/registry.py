"""The registered passes: what a user may name in ``--compile.passes`` and ``disable_passes``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from gt_passes.contract import GraphPass, check_declaration
from gt_passes.errors import PassDeclarationError, UnknownPassError

PassClass = TypeVar("PassClass", bound=type[GraphPass])

_PASSES: dict[str, type[GraphPass]] = {}


def register_pass(pass_class: PassClass) -> PassClass:
    """Make a pass known by its name. A decorator, above ``@dataclass``.

    Raises:
        PassDeclarationError: the class breaks the contract, or another class has its name.
    """
    check_declaration(pass_class)
    existing = _PASSES.setdefault(pass_class.name, pass_class)
    # A module that is reloaded, in a notebook for one, registers an equal class anew.
    same = (existing.__module__, existing.__qualname__)
    if same != (pass_class.__module__, pass_class.__qualname__):
        raise PassDeclarationError(
            pass_class.__qualname__,
            [f"the name {pass_class.name!r} is taken by {'.'.join(same)}"],
        )
    _PASSES[pass_class.name] = pass_class
    return pass_class


def known_passes() -> tuple[str, ...]:
    """The names of all registered passes, sorted."""
    return tuple(sorted(_PASSES))


def find_passes(names: Iterable[str]) -> tuple[type[GraphPass], ...]:
    """The registered classes of the given names, in their order.

    Raises:
        UnknownPassError: no pass has one of the names; lists every such name with near matches.
    """
    wanted = tuple(names)
    unknown = [name for name in wanted if name not in _PASSES]
    if unknown:
        raise UnknownPassError(unknown, known=_PASSES)
    return tuple(_PASSES[name] for name in wanted)
