"""The private PyTorch symbols behind compilation, each with its reason.

Apart from ``_torch_internals`` because Inductor takes seconds to import, and only those who compile
should wait for it: everything here is imported on use. Checked against torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, active_fake_mode, detect_fake_mode, tracing
from torch.fx import GraphModule

__all__ = [
    "buffer_operator",
    "compile_with_inductor",
    "fake_mode_is_active",
    "inductor_cache_folder",
    "known_inductor_options",
    "load_symmetric_memory_operators",
    "process_group_backend",
    "product_of",
    "symmetric_memory_backend",
    "symmetric_memory_workspaces",
]


def fake_mode_is_active() -> bool:
    """Whether operators are being run on fake tensors; there is no public way to ask."""
    return active_fake_mode() is not None


def inductor_cache_folder() -> Path:
    """Where Inductor keeps what it makes; only it knows the folder that holds by default."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


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


def product_of(compiled: object) -> bytes | None:
    """What Inductor's caches have of a graph that ``compile_with_inductor`` compiled, if anything.

    ``torch.compiler.save_cache_artifacts`` gives it for a process and not for a graph, and lacks
    what ``standalone_compile`` makes, which keeps that to itself.
    """
    artifacts = getattr(compiled, "_artifacts", None)
    return artifacts[0] if artifacts else None


def buffer_operator() -> Callable[..., torch.Tensor]:
    """An operator of which Inductor makes a buffer, and that does nothing else.

    ``inductor_force_stride_order(value, strides)``, with the strides that the value has. There is
    no public way to say that a value is to be computed once.
    """
    import torch._inductor.inductor_prims

    operator: Callable[..., torch.Tensor] = torch._inductor.inductor_prims.force_stride_order
    return operator


def load_symmetric_memory_operators() -> None:
    """Let torch register ``torch.ops.symm_mem.fused_*``, which it does on this import only."""
    import torch.distributed._symmetric_memory  # noqa: F401


def symmetric_memory_backend(device: torch.device) -> str | None:
    """What allocates symmetric memory on a device; None where nothing does.

    ``is_symm_mem_enabled_for_group`` asks this since torch 2.15. Before, it asks whether
    ``enable_symm_mem_for_group`` has been called, which is deprecated since 2.11: from then on the
    fused operators find a group by its name, as they find any.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.get_backend(device)


def symmetric_memory_workspaces() -> tuple[torch.Tensor, ...]:
    """The memory that the fused operators have made so far, one tensor for each group at most.

    An operator that needs more makes a larger one, and torch lets go of the one before. Who has
    recorded its address must keep it, and there is no public way to.
    """
    module = sys.modules.get("torch.distributed._symmetric_memory")
    if module is None:
        return ()
    of_group = module._group_name_to_workspace_tensor
    return tuple(tensor for tensor in of_group.values() if tensor is not None)


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
