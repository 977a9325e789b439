"""Runs PyTorch's samples of operators eagerly and captured, on operands that lie in many ways."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

from gt_trace import trace_step
from gt_trace.errors import GtTraceError

Layout = Callable[[torch.Tensor], torch.Tensor]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0] if tensor.dim() else tensor


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.dim() else tensor


LAYOUTS: dict[str, Layout] = {
    "transposed": _transposed,
    "sliced": _sliced,
    "expanded": _expanded,
}


_SEEDED_BY_US = mock.patch.object(
    common_methods_invocations,
    "wrapper_set_seed",
    lambda call, *args, **kwargs: call(*args, **kwargs),
)
"""PyTorch's samples of random operators set a generator, which a capture refuses."""


@dataclass
class Outcomes:
    """How many samples came out how, and the names of operators that differed."""

    counts: Counter[str] = field(default_factory=Counter)
    different: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    operators: set[str] = field(default_factory=set)


def operators(shard: int, num_shards: int, dtype: torch.dtype) -> list[Any]:
    """Return every ``num_shards``-th operator of PyTorch's that takes a dtype on a CPU."""
    known = [
        each for each in common_methods_invocations.op_db if dtype in each.supported_dtypes("cpu")
    ]
    return known[shard::num_shards]


def compare(
    chosen: list[Any], *, num_samples: int, skip: frozenset[str], dtype: torch.dtype
) -> Outcomes:
    """Compare eager and captured results, and gradients, of the first samples of operators."""
    outcomes = Outcomes()
    with warnings.catch_warnings(), _SEEDED_BY_US:
        warnings.simplefilter("ignore")
        for operator in chosen:
            if operator.name in skip:
                continue
            for step, tensors in _steps(operator, num_samples, dtype):
                outcome, detail = _outcome(step, tensors)
                outcomes.counts[outcome] += 1
                if outcome != "eager fails":
                    outcomes.operators.add(operator.name)
                if outcome in ("different", "failed", "refused"):
                    getattr(outcomes, outcome).setdefault(operator.name, detail)
    return outcomes


def _steps(
    operator: Any, num_samples: int, dtype: torch.dtype
) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    torch.manual_seed(0)
    trained = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=trained))
    for number, sample in enumerate(samples[:num_samples]):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, dict(sample.kwargs)))
        places = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        ]
        if not places or len(places) < sum(isinstance(leaf, torch.Tensor) for leaf in leaves):
            continue
        requires = [leaves[index].requires_grad for index in places]
        for layout in LAYOUTS.values():
            tensors = [layout(leaves[index].detach()) for index in places]

            def step(
                *tensors: torch.Tensor,
                leaves=leaves,
                spec=spec,
                places=places,
                requires=requires,
                weigh=number % 2 == 1,
            ) -> Any:
                given = list(leaves)
                for index, tensor, requires_grad in zip(places, tensors, requires, strict=True):
                    given[index] = tensor.detach().requires_grad_(requires_grad)
                source, args, kwargs = pytree.tree_unflatten(given, spec)
                results = operator(source, *args, **kwargs)
                outputs = [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]
                loss = sum(_loss(each, weigh) for each in outputs if each.requires_grad)
                if not isinstance(loss, torch.Tensor):
                    return outputs
                inputs = [each for each in pytree.tree_leaves(given) if _wants_gradient(each)]
                gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
                # A copy, since a result may be an input.
                return [*(each.detach().clone() for each in outputs), *gradients]

            yield step, tensors


def _loss(output: torch.Tensor, weigh: bool) -> torch.Tensor:
    """Return a sum, whose gradient is expanded; or a weighted one, whose gradient is dense."""
    value = output.abs() if output.is_complex() else output
    if weigh:  # factors of one would hide the order of products
        value = value * torch.linspace(0.3, 1.7, value.numel()).to(value.dtype).view(value.shape)
    return value.sum()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies as another one does, in memory of its own."""
    empty = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.untyped_storage().clone()
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _wants_gradient(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _outcome(step: Callable[..., Any], tensors: list[Any]) -> tuple[str, str]:
    def copies() -> list[Any]:
        return [_copy(each) for each in tensors]

    try:
        torch.manual_seed(0)
        expected = step(*copies())
    except Exception as error:  # noqa: BLE001 - eager refuses some layouts
        return "eager fails", repr(error)
    try:
        captured = trace_step(step)(*copies())
    except GtTraceError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - PyTorch has no fake kernel, or asks for values
        return "failed", f"{type(error).__name__}: {error}"
    try:
        torch.manual_seed(0)
        results = captured.bind()(*copies())
    except GtTraceError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - what the test is for
        return "different", f"{type(error).__name__}: {error}"
    if all(map(_same, results, expected)):
        return "equal", ""
    torch.manual_seed(0)
    if not all(map(_same, step(*copies()), expected)):
        return "eager differs from itself", ""
    return "different", f"{results} instead of {expected}"


def _same(got: object, want: object) -> bool:
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return got is want
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if got.dtype is torch.complex32:  # which nothing compares
        got, want = got.cfloat(), want.cfloat()
    if got.layout is not torch.strided:
        got, want = got.to_dense(), want.to_dense()
    if got.is_complex():
        got, want = (torch.view_as_real(each.resolve_conj()) for each in (got, want))
    if not got.is_floating_point():
        return torch.equal(got, want)
    got_holes, want_holes = got != got, want != want  # only NaNs differ from themselves
    got, want = got.masked_fill(got_holes, 0), want.masked_fill(want_holes, 0)
    signs = torch.equal(got.signbit(), want.signbit())
    return signs and torch.equal(got_holes, want_holes) and torch.equal(got, want)
