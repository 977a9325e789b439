"""What is known of an operator, and the tables in which it is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.rules.dim_labels import DimLabels, axis_options
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.sharded_call import Localize

Rule = Callable[[OperatorCall], Iterable[AxisOption]]
"""The options of one mesh axis. They may ignore sizes: options whose placements do not cut every
operand and output evenly are dropped afterwards."""


Fits = Callable[[OperatorCall, NodeOption, MeshShape], bool]
"""Whether an operator may run in a combination of options that each axis alone has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRule:
    """All that is known of an operator."""

    options: Rule
    localize: Localize | None
    """What a rank runs on its shards, where it is not the operator with the same arguments."""

    fits: Fits | None = None
    """Where the axes are not independent; None where they are, as nearly everywhere."""


Rules = dict[str, OperatorRule]
"""Rules by the operators' names: ``namespace.name.overload``, or ``namespace.name`` for all
overloads."""


def labelled(labels: Callable[[OperatorCall], DimLabels]) -> Rule:
    """The rule that a labelling of dims is."""

    def rule(call: OperatorCall) -> Iterable[AxisOption]:
        return axis_options(labels(call))

    return rule


def only_whole(call: OperatorCall) -> Iterable[AxisOption]:
    """The rule of what runs whole on every rank: every operator has that option anyway."""
    return ()


def rules_of(names: Iterable[str], rule: Rule, *, localize: Localize | None = None) -> Rules:
    """One rule for several operators of aten, each with all overloads or (``view.dtype``) one."""
    known = OperatorRule(options=rule, localize=localize)
    return {f"aten.{name}": known for name in names}
