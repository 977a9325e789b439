"""What each operator may do on a mesh, and what a rank then runs on its shards.

::

    dim_labels       the language of rules: dims that go together carry one label
    registry         operator -> rule; register_rule for operators of others
    pointwise, reductions, contractions, convolutions, views, pieces, along_dim, normalization,
    embedding, indexing, attention, flex_attention, loss, producers
                     the rules, one family a file
    index_reads      what a function of FlexAttention does with the number of a sample or head
    mesh_options     from options of one axis to those of a mesh
    experts          options of the routed experts of one layer
    node_options     options of every kind of node; errors for operators without a rule
    sharded_call, local_call
                     the operator on shards: sizes adapted, or another function
    operator_call, operator_rule
                     what a rule sees of a call, and what a rule is

A rule speaks of one mesh axis at a time. What makes that enough: an option's placements must cut
every operand and output evenly, also along dims that another axis has cut before.
"""

from __future__ import annotations

from gt_autoparallel.rules.dim_labels import DimLabels
from gt_autoparallel.rules.flex_attention import uncut_attention
from gt_autoparallel.rules.local_call import local_call
from gt_autoparallel.rules.node_options import (
    check_operators,
    node_options,
    replicated_operators,
)
from gt_autoparallel.rules.operator_call import CallOperand, OperatorCall
from gt_autoparallel.rules.operator_rule import Rule, labelled
from gt_autoparallel.rules.registry import register_rule
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall

__all__ = [
    "CallOperand",
    "DimLabels",
    "LocalCall",
    "OperatorCall",
    "Rule",
    "ShardedCall",
    "check_operators",
    "labelled",
    "local_call",
    "node_options",
    "register_rule",
    "replicated_operators",
    "uncut_attention",
]
