"""Running a forward twice, and parts of it once.

How many rows ranks exchange is found out once: who asks again waits for all ranks, and for the
host. If a plan says so, all that matrix products and exchanges make is kept too. The second run is
given it in their places, and computes what lies between. The idea is that of PyTorch's selective
activation checkpointing (``torch/utils/checkpoint.py``), which leaves the choice to a partitioner
where it is traced; a plan has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from gt_autoparallel._torch_internals import TorchDispatchMode

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
_EXCHANGES = frozenset({_collectives.all_to_all_single.default, _collectives.wait_tensor.default})
_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten._grouped_mm.default})

ResultT = TypeVar("ResultT")
_IsKept = Callable[[Any, Sequence[Any]], bool]
"""Says of an operator and its arguments whether the result of the first run is for both."""


class KeptResults:
    """Results of a first run, in order, for a second run of the same operators.

    Args:
        products: whether those of matrix products and of all exchanges; or only how many rows are
            exchanged, and what ranks tell one another of it.
    """

    def __init__(self, *, products: bool) -> None:
        self._products = products
        self._results: list[tuple[Any, Any]] = []

    def keep(self, run: Callable[[], ResultT]) -> ResultT:
        """Run for the first time."""
        with _Keep(self._results, self._is_kept):
            return run()

    def give(self, run: Callable[[], ResultT]) -> ResultT:
        """Run for the second time, once.

        Raises:
            AssertionError: the run is another one.
        """
        results, self._results = self._results, []
        with _Give(results, self._is_kept):
            found = run()
        assert not results, f"{len(results)} results of the first run were not asked for"
        return found

    def _is_kept(self, func: Any, args: Sequence[Any]) -> bool:
        if func is _aten._local_scalar_dense.default:
            return True
        if func in _EXCHANGES:
            return self._products or not args[0].is_floating_point()
        return self._products and func in _PRODUCTS


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(self, results: list[tuple[Any, Any]], is_kept: _IsKept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._results, self._is_kept = results, is_kept


class _Keep(_Run):  # type: ignore[no-untyped-call]  # as above
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_kept(func, args):
            self._results.append((func, result))
        return result


class _Give(_Run):  # type: ignore[no-untyped-call]  # as above
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self._is_kept(func, args):
            return func(*args, **(kwargs or {}))
        assert self._results, f"the first run had no more {func}"
        kept, result = self._results.pop(0)
        assert kept is func, f"the first run had {kept} where the second has {func}"
        return result
