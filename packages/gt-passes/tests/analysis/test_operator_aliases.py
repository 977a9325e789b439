"""The tables of operators that share memory or copy against their schemas, and the kernels."""

from __future__ import annotations

import pytest
import torch
from measured_aliases import measure, overloads, tables

from gt_passes.analysis.operator_aliases import (
    ALWAYS_SHARES,
    MAY_COPY,
    MAY_SHARE,
    aliased_arguments,
    has_aliased_results,
    only_makes_views,
)

aten, prims = torch.ops.aten, torch.ops.prims
X = torch.ones(4, 6)

SHARING = (
    (aten.unsafe_split.Tensor, (X, 2), {}),
    (aten.unsafe_chunk.default, (X, 2), {}),
    (aten.unsafe_split_with_sizes.default, (X, [1, 3]), {}),
    (aten._unsafe_view.default, (X, [24]), {}),
    (aten.atleast_1d.default, (X,), {}),
    (aten.atleast_3d.Sequence, ([X, X],), {}),
    (aten.broadcast_tensors.default, ([X, X],), {}),
    (prims.device_put.default, (X, torch.device("cpu")), {}),
    (aten._cast_Float.default, (X,), {}),
    (aten.type_as.default, (X, X), {}),
    (aten.dropout.default, (X, 0.5, False), {}),
    (aten.alpha_dropout.default, (X, 0.5, False), {}),
    (aten.feature_dropout.default, (X, 0.5, False), {}),
    (aten.conj_physical.default, (X,), {}),
    (aten.sum_to_size.default, (X, [4, 6]), {}),
    (aten.einsum.default, ("ij->ji", [X]), {}),
    (aten.to.dtype, (X, torch.float32), {}),
    (aten.reshape.default, (X, [24]), {}),
)


def _storages(results: object) -> set[int]:
    leaves = results if isinstance(results, (list, tuple)) else [results]
    return {leaf.untyped_storage().data_ptr() for leaf in leaves}


@pytest.mark.parametrize(("target", "args", "kwargs"), SHARING, ids=lambda each: str(each)[:40])
def test_what_returns_the_memory_of_its_argument_is_known_to(target, args, kwargs):
    assert _storages(target(*args, **kwargs)) == {X.untyped_storage().data_ptr()}
    assert has_aliased_results(target)
    assert aliased_arguments(target)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.reshape.default, (X.t(), [24])),
        (aten.contiguous.default, (X.t(),)),
        (aten.flatten.using_ints, (X.t(),)),
        (aten.to.dtype, (X, torch.float64)),
        (aten.type_as.default, (X, X.double())),
        (aten.conj_physical.default, (X.cfloat(),)),
        (aten.resolve_conj.default, (X.cfloat().conj(),)),
        (aten.dropout.default, (X, 0.5, True)),
    ],
    ids=lambda each: str(each)[:40],
)
def test_what_may_copy_is_no_view(target, args):
    assert _storages(target(*args)) != {args[0].untyped_storage().data_ptr()}
    assert not only_makes_views(target)


def test_what_copies_always_has_memory_of_its_own():
    for target in (aten._to_copy.default, aten.clone.default, prims.convert_element_type.default):
        assert not has_aliased_results(target)


@pytest.mark.slow  # about half a minute, nearly 1500 overloads
def test_every_operator_shares_what_the_tables_say():
    always, sometimes, copies = tables(measure(overloads()))
    known = {**MAY_SHARE, **ALWAYS_SHARES}
    unknown = {
        name: shared
        for name, shared in {**always, **sometimes}.items()
        if not shared <= set(known.get(name, ()))
    }
    assert not unknown
    assert not sometimes.keys() & ALWAYS_SHARES.keys()
    assert copies.keys() <= MAY_COPY
    assert ALWAYS_SHARES.keys() <= always.keys()
