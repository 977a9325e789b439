"""The private PyTorch symbols behind compilation, each with its reason.

Apart from ``_torch_internals`` because Inductor takes seconds to import, and only those who compile
should wait for it: everything here is imported on use. Checked against torch 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._guards import TracingContext, active_fake_mode, detect_fake_mode, tracing
from torch.fx import GraphModule

__all__ = [
    "compile_with_inductor",
    "fake_mode_is_active",
    "known_inductor_options",
    "load_symmetric_memory_operators",
    "process_group_backend",
    "symmetric_memory_is_enabled",
]


def fake_mode_is_active() -> bool:
    """Whether operators are being run on fake tensors; there is no public way to ask."""
    return active_fake_mode() is not None


@functools.cache
def known_inductor_options() -> frozenset[str]:
    """The names of ``torch._inductor.config``, nested ones with a dot."""
    import torch._inductor

    return frozenset(torch._inductor.list_options())


def compile_with_inductor(
    body: GraphModule, inputs: Sequence[Any], options: Mapping[str, object]
) -> Callable[..., Sequence[Any]]:
    """Compile a graph for the given fake inputs.

    ``standalone_compile`` is how Inductor offers to compile a graph without Dynamo. Its options are
    global, and can only be patched around the call. Sizes stay open as they are in the graph; how
    it would find that out from the graph depends on its version, so it is told the fake mode.
    """
    import torch._functorch.config
    import torch._inductor
    import torch._inductor.config

    mode = detect_fake_mode([each.meta.get("val") for each in body.graph.nodes])
    with (
        # Nothing is differentiated: the graph holds its own backward.
        torch.no_grad(),
        tracing(TracingContext(mode)),
        torch._inductor.config.patch(dict(options)),
        # A memory policy has already decided what to compute again. torch's own would act on tags
        # left on the nodes, and refuse graphs whose backward is not in one piece.
        torch._functorch.config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False),
    ):
        compiled: Callable[..., Sequence[Any]] = torch._inductor.standalone_compile(
            body, list(inputs), dynamic_shapes="from_tracing_context"
        )
    return compiled


def load_symmetric_memory_operators() -> None:
    """Let torch register ``torch.ops.symm_mem.fused_*``, which it does on this import only."""


def symmetric_memory_is_enabled(group_name: str) -> bool:
    """Whether torch would use symmetric memory for a group; there is no public question."""
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    return bool(
        is_symm_mem_enabled_for_group(
            group_name  # type: ignore[arg-type]  # a NewType of str, which torch 2.13 lacks
        )
    )


def process_group_backend(group_name: str) -> str | None:
    """The backend of a group by name, as "nccl"; None if this process has no such group.

    Functional collectives name their group, and only a private registry knows groups by name.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # not listed
        _resolve_process_group,
    )

    try:
        group = _resolve_process_group(
            group_name  # type: ignore[arg-type]  # a NewType of str, which torch 2.13 lacks
        )
    except (RuntimeError, KeyError, ValueError):
        return None
    return str(dist.get_backend(group))
