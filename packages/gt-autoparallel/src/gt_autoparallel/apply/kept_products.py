"""Running a forward twice, and the expensive parts of it once.

What matrix products and exchanges between ranks make is kept, and the second run is given it in
their places: it computes what lies between. The idea is that of PyTorch's selective activation
checkpointing (``torch/utils/checkpoint.py``), which leaves the choice to a partitioner where it is
traced; a plan has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from gt_autoparallel._torch_internals import TorchDispatchMode

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten._grouped_mm.default,
        _collectives.all_to_all_single.default,
        _collectives.wait_tensor.default,
        # How many rows are exchanged: a size, which must be the same in both runs.
        _aten._local_scalar_dense.default,
    }
)

ResultT = TypeVar("ResultT")


class KeptProducts:
    """Results of a first run, in order, for a second run of the same operators."""

    def __init__(self) -> None:
        self._results: list[tuple[Any, Any]] = []

    def keep(self, run: Callable[[], ResultT]) -> ResultT:
        """Run for the first time."""
        with _Keep(self._results):
            return run()

    def give(self, run: Callable[[], ResultT]) -> ResultT:
        """Run for the second time, once.

        Raises:
            AssertionError: the run is another one.
        """
        results, self._results = self._results, []
        with _Give(results):
            found = run()
        assert not results, f"{len(results)} products of the first run were not asked for"
        return found


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(self, results: list[tuple[Any, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._results = results

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _KEPT:
            self._results.append((func, result))
        return result


class _Give(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    def __init__(self, results: list[tuple[Any, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._results = results

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _KEPT:
            return func(*args, **(kwargs or {}))
        assert self._results, f"the first run had no more {func}"
        kept, result = self._results.pop(0)
        assert kept is func, f"the first run had {kept} where the second has {func}"
        return result
