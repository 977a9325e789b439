"""Annotations while a placed model is traced, and nothing of them while it runs eagerly."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

from torch.fx.traceback import has_preserved_node_meta

from gt_config.node_keys import NodeAnnotation
from gt_trace import annotate


def annotated(*annotations: NodeAnnotation | None) -> AbstractContextManager[object]:
    """Nodes traced inside carry ``annotations``; None stands for none."""
    if not has_preserved_node_meta():
        return nullcontext()
    with ExitStack() as stack:
        for annotation in annotations:
            if annotation is not None:
                stack.enter_context(annotate(annotation))
        return stack.pop_all()
