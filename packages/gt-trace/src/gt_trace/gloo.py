"""Gloo process groups whose collectives do not crash the process.

A gloo group of PyTorch (seen in 2.13.0, 2.14.1 and 2.15.0) completes collectives on two threads,
and both assign the same string when they are done (``ProcessGroupGloo::runLoop``). Two collectives
that end at the same time free its memory twice: sooner or later the process dies, with SIGABRT and
a complaint of ``malloc``. Eager programs mostly wait for one collective before they launch the
next; graphs whose passes let collectives overlap do not, nor does this::

    all_reduce, wait = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor
    for _ in range(20_000):  # on two ranks
        for launched in [all_reduce(torch.ones(2), "sum", group_name) for _ in range(8)]:
            wait(launched)

Groups with one thread each are not affected, and run their collectives in the order of launch, as
those of NCCL do.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist


def use_one_gloo_thread() -> bool:
    """Let gloo groups made from now on in this process have one thread each.

    Returns:
        Whether this version of PyTorch can be told so; 2.15 is the first.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        return False
    register: Any = dist.Backend.register_backend
    if "_backend_type" not in inspect.signature(register).parameters:
        return False  # gloo is built in there, and its number of threads with it
    register(
        dist.Backend.GLOO,
        _create_group,
        extended_api=True,
        devices=["cpu", "cuda"],
        _backend_type=dist.ProcessGroup.BackendType.GLOO,
    )
    return True


def _create_group(options: Any, _: object) -> dist.ProcessGroupGloo:
    """A gloo group, given ``torch.distributed``'s description of it."""
    gloo: Any = dist.ProcessGroupGloo
    settings = gloo._Options()
    settings._timeout = options.timeout
    settings._threads = 1
    settings._devices = [gloo.create_default_device()]
    settings.enable_reconfigure = options.enable_reconfigure
    group: dist.ProcessGroupGloo = gloo(
        options.store, options.group_rank, options.group_size, settings
    )
    group.options.global_ranks_in_group = options.global_ranks_in_group
    group.options.group_name = options.group_id
    return group
