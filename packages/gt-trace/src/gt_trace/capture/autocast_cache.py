"""Autocast's cache of cast parameters, in a capture and around replays.

A parameter that is used twice in one region of autocast is cast once, and its gradients are added
in the lower precision. ``make_fx`` turns the cache off, which would change both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import Node

from gt_trace._torch_internals import get_proxy_mode, is_any_autocast_enabled

RECAST = (
    "inputs are used several times in one region of autocast: eager PyTorch casts each once, and "
    "adds its gradients in the lower precision, where a joint graph has a cast for each use. Enter "
    "autocast with cache_enabled=False"
)
"""What a joint graph does in another way, and what to do."""


@contextmanager
def autocast_cache(*, enabled: bool) -> Iterator[None]:
    """Use the cache inside of a trace if it was ``enabled`` outside; keep no traced tensor in it.

    Outside of a trace the flag is ``enabled`` already. Autocast empties the cache where its
    outermost region ends; a region that surrounds the capture does not end.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        if is_any_autocast_enabled():
            torch.clear_autocast_cache()


@contextmanager
def repeated_casts() -> Iterator[dict[int, int]]:
    """Count how often autocast casts an input in one region, in a trace whose cache is of no use.

    The cache keeps casts of autograd's leaves. In the trace of a joint graph inputs are none.

    Yields:
        Filled when left: numbers of casts by the positions of inputs that have more than one.
    """
    repeated: dict[int, int] = {}
    mode = get_proxy_mode()
    if mode is None:
        yield repeated
        return
    tracer: Any = mode.tracer
    create_node, clear = tracer.create_node, torch.clear_autocast_cache
    casts: Counter[tuple[Any, object]] = Counter()

    def create_counted_node(*args: Any, **kwargs: Any) -> Node:
        node: Node = create_node(*args, **kwargs)
        if node.target is torch.ops.aten._to_copy.default and _is_made_by_autocast():
            casts[node.args[0], node.kwargs.get("dtype")] += 1
        return node

    def end_region() -> None:
        inputs = {
            node: place for place, node in enumerate(tracer.graph.find_nodes(op="placeholder"))
        }
        for (source, _), count in casts.items():
            if source in inputs and count > 1:
                repeated[inputs[source]] = count
        casts.clear()
        clear()

    tracer.create_node = create_counted_node
    try:
        with patch.object(torch, "clear_autocast_cache", end_region):
            yield repeated
            end_region()
    finally:
        tracer.create_node = create_node


def _is_made_by_autocast() -> bool:
    """Return whether autocast, which is off in its own kernels, makes a cast that it would keep."""
    torch.autocast_increment_nesting()
    is_inside = torch.autocast_decrement_nesting() > 0
    return (
        is_inside
        and torch.is_autocast_cache_enabled()
        and torch.is_grad_enabled()
        and not is_any_autocast_enabled()
    )


class SurroundingAutocast:
    """Finds replays in one region of autocast between which parameters changed.

    Eager PyTorch would compute with the casts of before the change, which it has in its cache. A
    replay casts the parameters that there are.

    Args:
        parameters: those of the captured module.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [
            each for each in parameters if each.requires_grad and each.dtype is torch.float32
        ]
        self._versions: list[int] = []
        self._probes: dict[str, tuple[torch.Tensor, Any]] = {}

    def is_stale(self, devices: Iterable[str]) -> bool:
        """Return whether parameters changed since the last call, which was in the same region.

        Args:
            devices: types of devices for which autocast is on.
        """
        versions = [each._version for each in self._parameters]
        is_same = [self._is_same_region(device) for device in devices]
        has_changed, self._versions = versions != self._versions, versions
        return all(is_same) and has_changed

    def _is_same_region(self, device: str) -> bool:
        """Cast a probe: in the same region its cast, and the autograd node of that, is the same."""
        probe, last = self._probes.get(device, (None, None))
        with torch.enable_grad():
            if probe is None:
                probe = torch.ones(1, 1, device=device, requires_grad=True)
            product: Any = torch.mm(probe, probe)
        cast = product.grad_fn.next_functions[0][0]
        self._probes[device] = probe, cast
        return cast is last
