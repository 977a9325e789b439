"""Which nodes of a captured MoE layer dispatch, compute and combine tokens.

torchtitan's token dispatchers name their parts by methods; those of the model's own instances are
annotated for the time of a capture (source of the names: torchtitan/models/common/token_dispatcher
.py and moe.py). The overlap of expert-parallel communication reads the annotations, never a
pattern.
"""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn
from torchtitan.models.common.moe import RoutedExperts

from gt_config.node_keys import EpExchangeAnnotation, EpRegionAnnotation, NodeAnnotation
from gt_trace import AnnotationHandle, annotate_method

_DISPATCHER_METHODS: tuple[tuple[str, NodeAnnotation], ...] = (
    ("dispatch", EpRegionAnnotation(kind="dispatch")),
    ("combine", EpRegionAnnotation(kind="combine")),
    ("_token_count_exchange", EpExchangeAnnotation(kind="token_count_exchange")),
    ("_dispatch_token_exchange", EpExchangeAnnotation(kind="token_exchange")),
    ("_combine_token_exchange", EpExchangeAnnotation(kind="token_exchange")),
)
"""Dispatchers that exchange nothing lack the exchanges; every one has dispatch and combine."""


def annotate_expert_regions(model: nn.Module) -> AnnotationHandle:
    """Annotate the routed experts of one model; undo with the handle.

    The experts' own computation is the region "compute"; what the router and shared experts do
    belongs to no region.
    """
    with ExitStack() as wrapped:  # takes them off again if a later one cannot be put on
        for module in model.modules():
            if not isinstance(module, RoutedExperts):
                continue
            compute = EpRegionAnnotation(kind="compute")
            wrapped.enter_context(annotate_method(module.inner_experts, "forward", compute))
            dispatcher = module.token_dispatcher
            for method, annotation in _DISPATCHER_METHODS:
                if hasattr(dispatcher, method):
                    wrapped.enter_context(annotate_method(dispatcher, method, annotation))
        return AnnotationHandle([wrapped.pop_all().close])
