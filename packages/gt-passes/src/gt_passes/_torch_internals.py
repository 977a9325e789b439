"""Every private PyTorch symbol that gt-passes relies on, in one place, each with its reason.

A new PyTorch needs edits here and nowhere else. Checked against torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

# The functional collectives register their operators when this module is imported, and a captured
# graph names them before anybody else may have imported it.
import torch.distributed._functional_collectives

# Keeps what a capture refuses to a user's code, as reading how often a tensor was written, from
# refusing it to a pass's wrapper.
from torch._C import DisableTorchFunction
from torch._library.utils import is_impure as _is_impure

# The log that tlparse reads; every part of PyTorch that is worth looking at writes to it.
from torch._logging._internal import trace_structured
from torch._ops import HigherOrderOperator, OpOverload

# Fake values are what a captured graph carries; there is no public way to know one, or its mode.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    maybe_get_fake_mode,
    unset_fake_temporarily,
)
from torch.fx import Graph, GraphModule, Node

# Graphs whose code is generated when it is asked for; there is no public way.
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# To measure which memory is alive while a graph runs: the tensors of every operator, and whether
# their storages still exist. Neither has a public form.
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CANNOT_REPROPAGATE",
    "DisableTorchFunction",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "StorageWeakRef",
    "TorchDispatchMode",
    "device_of",
    "fake_mode_of",
    "fast_tensor_attributes",
    "graph_module_without_code",
    "has_declared_effect",
    "is_fake_tensor",
    "is_zero_tensor",
    "layout_of",
    "plain_zeros",
    "pytree",
    "quiet_fake_execution",
    "torch_group_description",
    "torch_group_ordinal",
    "torch_group_ranks",
    "trace_structured",
    "traced_symbol_values",
    "unset_fake_temporarily",
    "value_of",
]

CANNOT_REPROPAGATE: tuple[type[Exception], ...] = (
    # The operator has no fake implementation, or one whose answer depends on data. These say
    # nothing about the graph; every other exception does.
    UnsupportedOperatorException,
    DynamicOutputShapeException,
    DataDependentOutputException,
    GuardOnDataDependentSymNode,
    NotImplementedError,
)


def value_of(node: Node) -> object:
    """The fake value that tracing recorded for a node; None where there is none."""
    return node.meta.get("val")


def is_fake_tensor(value: object) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, torch.Tensor) and maybe_get_fake_mode(value) is not None


def is_zero_tensor(value: object) -> bool:
    """Whether a value is one of the tensors without memory that stand for zeros in forward mode."""
    return isinstance(value, torch.Tensor) and value._is_zerotensor()


def plain_zeros(value: object) -> torch.Tensor:
    """An ordinary tensor in place of one for which ``is_zero_tensor`` holds."""
    assert isinstance(value, torch.Tensor)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor recorded in a graph, or None."""
    for node in graph.nodes:
        value = value_of(node)
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            mode = maybe_get_fake_mode(leaf)
            if mode is not None:
                return mode
    return None


def graph_module_without_code(
    attributes: GraphModule | dict[str, Any], graph: Graph
) -> GraphModule:
    """A module of a graph whose code is generated when somebody asks for it.

    Args:
        attributes: has what ``get_attr`` nodes of the graph name.
        graph: any.
    """
    with _use_lazy_graph_module(True):
        return _make_graph_module(attributes, graph)


@contextmanager
def quiet_fake_execution(
    fake_mode: FakeTensorMode, *, learns_sizes: bool = False
) -> Iterator[None]:
    """Run operators on fake tensors without leaving a trace of it.

    Nothing is recorded for autograd, ambient autocast does not change dtypes, and the shape
    environment gets no guards and expects nobody to bind the data-dependent sizes that appear.

    Args:
        fake_mode: that of the tensors.
        learns_sizes: whether the shape environment notes what operators demand of sizes that depend
            on data (that they are not negative, or add up to another), as in a capture. For who
            makes new ones.
    """
    with ExitStack() as stack:
        if fake_mode.shape_env is not None:
            if not learns_sizes:
                stack.enter_context(fake_mode.shape_env.suppress_guards())
            stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(fake_mode)
        yield


def fast_tensor_attributes() -> AbstractContextManager[None]:
    """Read attributes of fake tensors without asking each time whether their class overrides them.

    Whoever asks all tensors of a graph for everything else needs half as long again.
    """
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return disabled


# FakeTensor overrides layout and device with properties that ask for its mode and its keys.
_layout_of_any_tensor: Callable[[torch.Tensor], torch.layout] = vars(torch._C.TensorBase)[
    "layout"
].__get__


def layout_of(tensor: torch.Tensor) -> torch.layout:
    """``tensor.layout``, without asking fake tensors that have no keys of their own for them."""
    if getattr(tensor, "dispatch_keys", None) is None:
        return _layout_of_any_tensor(tensor)
    return tensor.layout


def device_of(tensor: torch.Tensor) -> torch.device:
    """``tensor.device``, without asking fake tensors whether a kernel runs, for who runs none."""
    device: torch.device | None = getattr(tensor, "fake_device", None)
    return tensor.device if device is None else device


def has_declared_effect(node: Node) -> bool:
    """Whether PyTorch knows an effect of a ``call_function`` node.

    Mutable schemas, waits, asserts, effectful custom operators, and operators that draw random
    numbers. ``Node.is_impure`` answers the same but for random operators under a Dynamo context,
    where it may call them pure; here drawing a number always counts.
    """
    assert callable(node.target)  # true of call_function nodes
    return _is_impure(node.target, args=node.args, kwargs=node.kwargs, impure_random=True)


def torch_group_ranks(group_name: str) -> tuple[int, ...] | None:
    """The global ranks of a process group by its name; None if this process has no such group.

    Functional collectives name their group, and only a private registry knows groups by name.
    """
    resolve: Any = vars(torch.distributed.distributed_c10d)["_resolve_process_group"]
    try:
        group = resolve(group_name)
    except (RuntimeError, KeyError, ValueError):
        return None
    return tuple(torch.distributed.get_process_group_ranks(group))


def torch_group_description(group_name: str) -> str | None:
    """What a process group was described as when it was made; None if there is no such group.

    Names are used again once torch.distributed was shut down; descriptions are whoever asked's own.
    """
    resolve: Any = vars(torch.distributed.distributed_c10d)["_resolve_process_group"]
    try:
        description: str = resolve(group_name).group_desc
    except (RuntimeError, KeyError, ValueError):
        return None
    return description


def torch_group_ordinal(group_name: str) -> int:
    """How many process groups of exactly the same ranks this process made before one.

    Groups of the same ranks are told apart by the order in which they were made, which torch asks
    to be the same on all of them; only its own registry keeps that order.
    """
    distributed: Any = vars(torch.distributed.distributed_c10d)
    group = distributed["_resolve_process_group"](group_name)
    ranks = torch.distributed.get_process_group_ranks(group)
    same = [
        other
        for other in distributed["_world"].pg_map
        if torch.distributed.get_process_group_ranks(other) == ranks
    ]
    return next((index for index, other in enumerate(same) if other is group), 0)


def traced_symbol_values(size: torch.SymInt) -> Mapping[Any, int]:
    """What the symbols of traced inputs were, by symbol; those that depend on data are not in it.

    ``SymNode.hint`` answers for a whole expression only, and for none with one such symbol.
    """
    shape_env = size.node.shape_env
    values: Mapping[Any, int] | None = getattr(shape_env, "backed_var_to_val", None)
    if values is None:  # its name before torch 2.15
        values = getattr(shape_env, "var_to_val", {})
    return values
