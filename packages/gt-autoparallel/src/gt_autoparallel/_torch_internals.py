"""Every private symbol of PyTorch that this package uses, in one place, with the reason for each.

Checked against the installed source of torch 2.15; a new PyTorch is checked here and nowhere else.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

# Arguments that belong to another trace are of this type.
from torch._subclasses.fake_tensor import FakeTensor

# make_fx is the tracer itself; it has no public name.
from torch.fx.experimental.proxy_tensor import make_fx

# To keep what operators made, and to give it in their places; it has no public name.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "argument_defaults",
    "draws_random_numbers",
    "functional_twin",
    "has_gradient_hooks",
    "make_fx",
    "module_hooks",
    "operator_name",
    "operator_path",
    "returns_new_storage",
    "shares_memory",
    "views_first_argument",
    "writes_to_arguments",
]

# ``OpOverload`` is the type of what stands in the nodes of a captured graph; it has no public name.


def operator_path(operator: OpOverload) -> tuple[str, str, str]:
    """Namespace, name and overload of an operator: ``torch.ops`` finds it again by these.

    The schema is private, but the only place that spells an overload's name apart from its
    operator's.
    """
    namespace, _, name = operator._schema.name.partition("::")
    return namespace, name, operator._overloadname


def operator_name(operator: OpOverload | HigherOrderOperator) -> str:
    """Full name of an operator, under which rules know it.

    Of an operator of operators ``higher_order.name``: its own text has no namespace.
    """
    if isinstance(operator, HigherOrderOperator):
        return f"higher_order.{operator.name()}"  # type: ignore[no-untyped-call]  # torch's
    return str(operator)


def argument_defaults(operator: OpOverload | HigherOrderOperator) -> dict[str, Any]:
    """Every argument of an operator by name, in order, with its default (None without one).

    An operator of operators has no schema; its arguments are those of its Python method.
    """
    if isinstance(operator, HigherOrderOperator):
        _, *parameters = inspect.signature(type(operator).__call__).parameters.values()
        return {
            each.name: None if each.default is inspect.Parameter.empty else each.default
            for each in parameters
        }
    return {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in operator._schema.arguments
    }


def writes_to_arguments(operator: OpOverload) -> bool:
    """Whether an operator writes into one of its arguments, as its schema says."""
    return bool(operator._schema.is_mutable)


def functional_twin(operator: OpOverload) -> OpOverload | None:
    """The operator that returns what ``operator`` writes into its first argument and returns.

    ``aten.add.Scalar`` of ``add_.Scalar``, for example. None if it writes anything else, or if no
    operator of that name takes the same: ``aten.pow.Scalar`` has a scalar where ``pow_.Scalar`` has
    the tensor that it writes to. Outside of PyTorch's own namespaces names promise nothing.
    """
    first, *others = operator._schema.arguments
    returned = operator._schema.returns
    writes = first.alias_info is not None and first.alias_info.is_write
    if not writes or len(returned) != 1 or any(each.alias_info is not None for each in others):
        return None
    namespace, name, overload = operator_path(operator)
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin: OpOverload | None = getattr(packet, overload or "default", None)
    if not name.endswith("_") or namespace not in ("aten", "prims") or twin is None:
        return None
    is_twin = not writes_to_arguments(twin) and _signature(twin) == _signature(operator)
    return twin if is_twin else None


def _signature(operator: OpOverload) -> list[tuple[str, str]]:
    """Name and type of every argument."""
    return [(each.name, str(each.type)) for each in operator._schema.arguments]


def returns_new_storage(operator: OpOverload) -> bool:
    """Whether what an operator returns is in no argument's storage, as its schema says."""
    return all(each.alias_info is None for each in operator._schema.returns)


def draws_random_numbers(operator: OpOverload) -> bool:
    """Whether an operator may draw random numbers, as its tags say."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def views_first_argument(operator: OpOverload) -> bool:
    """Whether an operator returns a view of its first argument, as its schema says."""
    schema = operator._schema
    first = schema.arguments[:1]
    return (
        len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
        and bool(first)
        and first[0].alias_info is not None
    )


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether something is called with the gradient of ``parameter``.

    There is no public way to ask for the hooks of a tensor.
    """
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


_REGISTERED_BY = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}


def module_hooks(module: torch.nn.Module) -> tuple[str, ...]:
    """The methods by which hooks were registered that a call of ``module`` would run.

    There is no public way to ask for the hooks of a module.
    """
    return tuple(method for held, method in _REGISTERED_BY.items() if getattr(module, held))


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage; fake ones, too.

    Storages compare by address only if they have one, which fake ones have not.
    """
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]  # not in its stub
