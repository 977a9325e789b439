"""The table from operators to rules, and how others add to it.

An operator is found under its full name (``aten.mm.default``) or under that of all its overloads
(``aten.mm``); the full name goes first. Rules are found by name, so that a rule may speak of an
operator whose library is not loaded.
"""

from __future__ import annotations

from gt_autoparallel._torch_internals import HigherOrderOperator, OpOverload, operator_name
from gt_autoparallel.rules import (
    along_dim,
    attention,
    contractions,
    convolutions,
    embedding,
    flex_attention,
    indexing,
    loss,
    normalization,
    pieces,
    pointwise,
    producers,
    reductions,
    views,
)
from gt_autoparallel.rules.operator_rule import OperatorRule, Rule, Rules
from gt_autoparallel.rules.sharded_call import Localize

FAMILIES = (
    along_dim,
    attention,
    contractions,
    convolutions,
    embedding,
    flex_attention,
    indexing,
    loss,
    normalization,
    pieces,
    pointwise,
    producers,
    reductions,
    views,
)
_OWN: Rules = {name: rule for family in FAMILIES for name, rule in family.RULES.items()}
_REGISTERED: Rules = {}
_version = 0


def register_rule(
    operator: OpOverload | str, rule: Rule, *, localize: Localize | None = None
) -> None:
    """Say how an operator may be placed; replaces what was said of it before.

    ::

        @torch.library.custom_op("mylib::gate", mutates_args=())
        def gate(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor: ...

        def rows(call: OperatorCall) -> DimLabels:
            # (tokens, width), (width,) -> (tokens, width): any rank may take some of the tokens.
            return DimLabels(operands=(("t", None), (None,)), outputs=(("t", None),))

        register_rule("mylib.gate.default", labelled(rows))

    Args:
        operator: an operator, or its name: ``namespace.name.overload``, or ``namespace.name`` for
            all of its overloads.
        rule: from a call to the options of one mesh axis.
        localize: what a rank runs on its shards, where arguments hold global sizes or the result
            depends on the rank's coordinate; None if the operator itself, with the same arguments.

    Raises:
        ValueError: the name has no namespace.
    """
    global _version
    name = str(operator)
    if "." not in name:
        raise ValueError(
            f"operator {name!r}: allowed: an OpOverload, or a name like 'mylib.gate.default' or "
            "'mylib.gate'"
        )
    _REGISTERED[name] = OperatorRule(options=rule, localize=localize)
    _version += 1


def forget_rule(operator: OpOverload | str) -> None:
    """Take back what ``register_rule`` said of an operator, if anything."""
    global _version
    _REGISTERED.pop(str(operator), None)
    _version += 1


def find_rule(operator: OpOverload | HigherOrderOperator) -> OperatorRule | None:
    """The rule of an operator, or None."""
    name = operator_name(operator)
    packet = name.rpartition(".")[0]
    for table in (_REGISTERED, _OWN):
        rule = table.get(name) or table.get(packet)
        if rule is not None:
            return rule
    return None


def version() -> int:
    """Changes whenever a rule is registered: part of the key of what is cached."""
    return _version
