"""One spelling of calls that PyTorch takes in several: by its schema, the same call is one form.

Arguments are positional where they can be, defaults are left out, and dims count from the front.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.call_form import CallForm, call_form
from gt_passes.analysis.graph_scan import NodeCall

_NAMES_OF_DIMS = frozenset({"dim", "dims", "dim1", "dim2", "dimension"})

_TAKE_DIMS_OF_FIRST_TENSOR = frozenset(
    {
        *("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all"),
        *("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp"),
        *("softmax", "log_softmax", "_softmax", "_log_softmax", "_softmax_backward_data"),
        *("_log_softmax_backward_data", "glu", "glu_backward", "cumsum", "cumprod", "cummax"),
        *("cummin", "logcumsumexp", "topk", "sort", "argsort", "kthvalue", "median", "mode"),
        *("gather", "scatter", "scatter_add", "index_select", "index_add", "index_copy"),
        *("flip", "roll", "diagonal", "unfold", "slice_scatter", "select_scatter"),
        *("scatter_", "scatter_add_", "index_add_", "index_copy_", "index_fill", "index_fill_"),
    }
)
"""Operators of ATen whose dims are those of their first argument, and not of a result."""


class Spelling(NamedTuple):
    """The spelling of a call that stands for all of them."""

    form: CallForm

    order: tuple[int, ...]
    """The index of each operand of ``form`` among the operands of the call as it was written."""


def canonical_call(form: CallForm, call: NodeCall, ranks: Sequence[int | None]) -> Spelling:
    """Return the one spelling of a call.

    Args:
        form: form of the call.
        call: of any function; those without a schema have one spelling.
        ranks: number of dims of each operand; None where it has none or symbolic sizes.
    """
    operands = call.split()[1]
    as_written = Spelling(form, tuple(range(len(operands))))
    target = call.target
    if not isinstance(target, OpOverload):
        return as_written
    parameters = _parameters(target)
    given = dict(zip((each.name for each in parameters), call.args, strict=False)) | dict(
        call.kwargs
    )
    if len(given) != len(call.args) + len(call.kwargs):
        return as_written  # the operator refuses it
    index_of = {node: index for index, node in reversed(list(enumerate(operands)))}
    rank = _rank_of_first(call, index_of, ranks)
    positional: list[Any] = []
    num_positional = 0
    keywords: dict[str, Any] = {}
    for parameter in parameters:
        value = parameter.spelled(given.get(parameter.name, parameter.default), rank)
        is_default = parameter.has_default and _is_same(value, parameter.default)
        if not parameter.by_name:
            positional.append(value)
            num_positional = num_positional if is_default else len(positional)
        elif not is_default:
            keywords[parameter.name] = value
    spelled, nodes = call_form(target, positional[:num_positional], keywords)
    return Spelling(spelled, tuple(index_of[node] for node in nodes))


class _Parameter(NamedTuple):
    name: str
    by_name: bool
    has_default: bool
    default: Any
    is_float: bool
    is_list: bool
    is_dim: bool

    def spelled(self, value: Any, rank: int | None) -> Any:
        if isinstance(value, (list, tuple)):
            value = list(value)
        if self.is_list and type(value) is int:
            value = [value]
        if self.is_float and type(value) is int:
            return float(value)
        if not self.is_dim or rank is None:
            return value
        if type(value) is int and value < 0:
            return value + max(rank, 1)
        if type(value) is list:
            return [
                item + max(rank, 1) if type(item) is int and item < 0 else item for item in value
            ]
        return value


@functools.cache
def _parameters(target: OpOverload) -> tuple[_Parameter, ...]:
    namespace, _, name = target._schema.name.partition("::")
    takes_dims = namespace == "aten" and name in _TAKE_DIMS_OF_FIRST_TENSOR
    found = []
    for argument in target._schema.arguments:
        kind = str(argument.type)
        is_list = "List[" in kind
        default = argument.default_value if argument.has_default_value() else None
        found.append(
            _Parameter(
                name=argument.name,
                by_name=argument.kwarg_only,
                has_default=argument.has_default_value(),
                default=list(default) if isinstance(default, (list, tuple)) else default,
                is_float=kind in ("float", "Optional[float]"),
                is_list=is_list and "int" in kind,
                is_dim=takes_dims and argument.name in _NAMES_OF_DIMS and "int" in kind,
            )
        )
    return tuple(found)


def _rank_of_first(
    call: NodeCall, index_of: dict[Node, int], ranks: Sequence[int | None]
) -> int | None:
    first = call.args[0] if call.args else call.kwargs.get("self")
    return ranks[index_of[first]] if isinstance(first, Node) else None


def _is_same(value: Any, default: Any) -> bool:
    # 1, 1.0 and True are equal; symbolic sizes must not be compared.
    if type(value) is not type(default):
        return False
    if isinstance(value, list):
        return len(value) == len(default) and all(map(_is_same, value, default))
    return value is default or bool(value == default)
