"""Typed reading and writing of the annotations on graph nodes.

Passes see the dataclasses of ``gt_config.node_keys`` and never a loose key. The annotations stand
in ``node.meta["custom"]``, where ``torch.fx.traceback.annotate`` puts them and where every tool of
PyTorch carries them along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch.fx import Node

from gt_config.node_keys import (
    ModuleAnnotation,
    NodeAnnotation,
    Phase,
    PhaseAnnotation,
)

_CUSTOM = "custom"

A = TypeVar("A", bound=NodeAnnotation)


def node_annotations(node: Node) -> Mapping[str, object]:
    """Everything annotated on ``node``, ours and others', as stored; empty where nothing is."""
    custom: Mapping[str, object] = node.meta.get(_CUSTOM) or {}
    return custom


def read_annotation(node: Node, concept: type[A]) -> A | None:
    """The annotation of that concept on ``node``, or None.

    Raises:
        NodeMetadataVersionError: it was written with another version of the keys.
        NodeMetadataError: it is malformed.
    """
    return concept.from_meta(node_annotations(node))


def write_annotation(node: Node, annotation: NodeAnnotation) -> None:
    """Put ``annotation`` on ``node``, over one of the same concept; others stay."""
    # A new dictionary: nodes made in one annotation context may share the old one.
    node.meta[_CUSTOM] = {**node_annotations(node), **annotation.to_meta()}


def remove_annotation(node: Node, concept: type[NodeAnnotation]) -> None:
    """Take the annotation of that concept off ``node``, if it is there."""
    custom = node_annotations(node)
    if concept.KEY in custom:
        node.meta[_CUSTOM] = {key: value for key, value in custom.items() if key != concept.KEY}


def copy_annotations(source: Node, target: Node) -> None:
    """Give ``target`` every annotation of ``source``, as a new node stands for an old one."""
    target.meta[_CUSTOM] = {**node_annotations(target), **node_annotations(source)}


def module_fqn(node: Node) -> str:
    """Fully qualified name of the module that the node belongs to; empty for none or the root."""
    annotation = read_annotation(node, ModuleAnnotation)
    return "" if annotation is None else annotation.fqn


def phase_of(node: Node) -> Phase | None:
    """The phase of the training step; None for placeholders and the output."""
    annotation = read_annotation(node, PhaseAnnotation)
    return None if annotation is None else annotation.phase


def is_backward(node: Node) -> bool:
    """Whether autograd's backward made the node."""
    return bool(node.meta.get("autograd_backward", False))


def sequence_number(node: Node) -> int | None:
    """Autograd's sequence number, equal for a forward node and the backward nodes it caused."""
    number: Any = node.meta.get("seq_nr")
    return number if isinstance(number, int) else None
