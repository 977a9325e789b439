"""What would make a captured graph impure: refused, with every case listed.

A replay runs operators and nothing else. A buffer that Python replaced, a ``.grad`` that was
written, a tensor that is neither state nor argument: all of these would be lost or frozen. Nor has
a capture the values of tensors, so that Python cannot decide by them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gt_trace._torch_internals import (
    asks_for_values,
    is_traceable_wrapper_subclass,
    lacks_fake_kernel,
    pytree,
    storage_key,
)
from gt_trace.capture.module_state import StateSlot
from gt_trace.capture.stack_traces import is_of_user
from gt_trace.capture.subclass_layout import flatten_tensor
from gt_trace.errors import CaptureError, ConstantCapturedError


@contextmanager
def refuse_data_dependence() -> Iterator[None]:
    """Refuse Python, run inside, that needs the value of a tensor, or a size that depends on one.

    Raises:
        CaptureError: names the line.
    """
    try:
        yield
    except Exception as error:
        refusal = refusal_of(error)
        if refusal is None or refusal is error:
            raise
        raise refusal from error


def refusal_of(error: Exception) -> CaptureError | None:
    """Return the refusal of what raised an error while a step was traced.

    Args:
        error: A refusal is returned as it is.

    Returns:
        None for errors that eager execution raises too.
    """
    if isinstance(error, CaptureError):
        return error
    replaces = any(each in str(error) for each in _REPLACING)
    frames = list(traceback.walk_tb(error.__traceback__))
    files = {frame.f_code.co_filename.replace(os.sep, "/") for frame, _ in frames}
    known = None
    if not _SIZE_BY_VALUE.search(str(error)):
        known = next(
            (
                (problem, remedy)
                for part, file, problem, remedy in _KNOWN
                if part in str(error) and any(each.endswith(file) for each in files)
            ),
            None,
        )
    if not (replaces or known or asks_for_values(error) or lacks_fake_kernel(error)):
        return None
    lines = [frame for frame in frames if is_of_user(frame[0].f_code)]
    where = "".join(traceback.StackSummary.extract(iter(lines[-1:])).format()).rstrip()
    what = str(error).strip().partition("\n")[0].partition(" (unhinted")[0]
    called = [f for f, _ in frames if f.f_code.co_filename.endswith("distributed_c10d.py")]
    if called:
        return CaptureError(collective_refusal(called[0].f_code.co_name, where))
    if known:
        return CaptureError(f"{known[0]} ({what.partition('. This')[0]}):\n{where}\n{known[1]}")
    if replaces:
        return CaptureError(
            "the step replaces tensors or their memory, and a replay would not replace them "
            f"({what}):\n{where}\nWrite the new values in place (with torch.no_grad(): "
            "tensor.copy_(values)), or do it outside of the step"
        )
    if lacks_fake_kernel(error):
        return CaptureError(
            "an operator has no rule for the tensors of a capture, which have no values "
            f"({what}):\n{where}\nRegister one (torch.library.register_fake), or compute with "
            "other operators"
        )
    return CaptureError(values_needed(what, where, _remedy(frames)))


_SIZE_BY_VALUE = re.compile(r"SymIntArrayRef expected.* at index \d+: [^.]*\bu\d+")
"""An error for a size that depends on values: its symbols have these names."""

_NESTED = (
    "the step makes a nested tensor, whose sizes are values",
    "Pass padded tensors, and mask what lies behind their ends",
)
_KNOWN = (
    (
        "SymIntArrayRef expected",
        "",
        "an operator takes numbers where the step passes a dynamic size",
        "Do not mark the dimension as dynamic, or pass what needs its size as an argument",
    ),
    ("is not tracked with proxy", "/torch/nested/__init__.py", *_NESTED),
    ("nested_tensor_from_jagged does not support", "", *_NESTED),
    (
        "tensors do not have strides",
        "",
        "the step reads a sparse tensor from outside in a layout that no graph has",
        "Pass its dense parts as arguments, and put them together inside the step",
    ),
    *(
        (
            part,
            "/torch/autograd/functional.py",
            "a Jacobian by forward mode mixes tensors of the capture with tensors without data",
            "Use torch.func.jacfwd",
        )
        for part in ("devices, meta and cpu", "devices meta, cpu")  # by version
    ),
    (
        "argument of type: <class 'torch._C.Generator'>",
        "",
        "an operator draws from a torch.Generator, which no graph of this version of PyTorch holds",
        "Let it draw from the default generator, or use a newer PyTorch",
    ),
)
"""What raised an error of PyTorch in a trace: a part of its text, the end of the name of a file in
which it arose, and the problem and remedy that a refusal names."""


def collective_refusal(name: str, where: str) -> str:
    """Return the text that refuses a collective of eager execution.

    Args:
        name: function or operator.
        where: line of the user's code.
    """
    return (
        f"the step calls a collective of eager execution ({name}), which writes its operands and "
        f"is no operator of a graph:\n{where}\nUse one that returns its result "
        "(torch.distributed._functional_collectives.all_reduce and others), or call it outside of "
        "the step"
    )


_REPLACING = (
    "_apply(): Couldn't swap",
    "Cannot swap t",
    "Cannot swap_tensors",
    "cannot assign 'torch.",
    "argument of type: <class 'torch.storage",
    "_share_fd_: only",
)
"""Parts of the errors that PyTorch raises where Python replaces a tensor of a trace."""


def values_needed(what: str, where: str, remedy: str = "") -> str:
    """Return the text that refuses Python that needs the value of a tensor.

    Args:
        what: operation or error.
        where: line of the user's code.
        remedy: instead of the general one.
    """
    return (
        "the step needs the value of a tensor while it is captured, when tensors have none "
        f"({what}):\n{where}\n"
    ) + (remedy or _REMEDY)


_REMEDY = (
    "Python runs once, and what it decides is the same in every "
    "replay. Compute with tensors instead of branching, looping or indexing by their "
    "values (torch.where instead of if, a mask instead of a selection), return what is to "
    "be printed or logged, and decide outside of the step"
)


def _remedy(frames: Sequence[tuple[FrameType, int]]) -> str:
    for frame, _ in frames:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if "/torch/distributions/" in file:
            return "A distribution checks its parameters and values; pass validate_args=False to it"
        if "/torch/optim/" in file:
            return (
                "The optimizer decides by numbers in its tensors. Step it outside of the capture, "
                "with gradients that the step returns, or use one without such decisions (SGD, "
                "Adam, AdamW)"
            )
        is_packed = file.endswith("/torch/nn/modules/rnn.py") and (
            frame.f_locals.get("batch_sizes") is not None
        )
        if is_packed or file.endswith("/torch/nn/utils/rnn.py"):
            return (
                "Lengths of packed sequences are values; pass padded sequences, and mask what lies "
                "behind their ends"
            )
    return ""


def refuse_unknown_results(result: Any) -> None:
    """Refuse results that are neither tensors nor plain values, nor containers of them.

    Raises:
        CaptureError: lists each, by its path.
    """
    problems = [
        f"result{pytree.keystr(path)} {problem}"
        for path, leaf in pytree.tree_flatten_with_path(result)[0]
        if (problem := result_problem(leaf))
    ]
    if problems:
        raise CaptureError("the step's results cannot be captured:\n  " + "\n  ".join(problems))


def result_problem(leaf: Any) -> str | None:
    """Return why a leaf of a result is none that a graph can return; None for those it can."""
    kind = type(leaf)
    is_wrapper = is_traceable_wrapper_subclass(leaf)
    if isinstance(leaf, torch.Tensor) and not (is_wrapper or isinstance(leaf, nn.Parameter)):
        given = [name for name in vars(leaf) if name not in _OF_STAND_INS and name[0] != "_"]
        if given:
            return f"has the attribute {given[0]}; return the value of the attribute, too"
    if isinstance(leaf, torch.Tensor | Enum) or kind in _PLAIN_RESULTS:
        return None
    article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
    if dataclasses.is_dataclass(kind):
        return (
            f"is {article} {kind.__name__}, a dataclass; return a tuple or a dictionary, or call "
            f"torch.export.register_dataclass({kind.__name__}) first"
        )
    return (
        f"is {article} {kind.__name__}; return tensors, numbers, strings, None, or tuples, lists "
        "and dictionaries of them"
    )


_OF_STAND_INS = frozenset(
    {"fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor", "elem"}
)
"""Attributes that the tensors of a trace have, and those of a user do not."""

_PLAIN_RESULTS = frozenset(
    {
        *(bool, int, float, complex, str, type(None), range, torch.Size),
        *(torch.SymInt, torch.SymFloat, torch.SymBool),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


def refuse_side_effects(
    slots: Sequence[StateSlot],
    before: Sequence[tuple[torch.Tensor | None, ...]],
) -> None:
    """Refuse a step that replaced state, or left a ``.grad`` that no captured optimizer holds.

    Raises:
        CaptureError: lists every such tensor.
    """
    problems: list[str] = []
    grads: list[str] = []
    for slot, held in zip(slots, before, strict=True):
        kind, name = slot.entry.kind, slot.entry.name
        if any(new is not old for new, old in zip(slot.contents(), held, strict=True)):
            problems.append(
                f"{kind} {name} was replaced, and a replay would not replace it; update it in "
                "place (copy_, add_)"
            )
        if any(old is not None and _has_grad(old) for old in held):
            grads.append(f"{name}.grad")
    if grads:
        was, it = ("was", "it") if len(grads) == 1 else ("were", "them")
        problems.append(
            f"{', '.join(grads)} {was} written, and a replay would lose {it}; use "
            "torch.autograd.grad and return the gradients, or give the parameters to the optimizer "
            "of the step, or let them require no gradient"
        )
    if problems:
        raise CaptureError("the step has side effects:\n  " + "\n  ".join(problems))


def _has_grad(tensor: torch.Tensor) -> bool:
    # Asking anything but a leaf makes torch warn.
    return tensor.is_leaf and tensor.grad is not None


def refuse_constants(graph_module: GraphModule, slots: Sequence[StateSlot]) -> None:
    """Refuse tensors that the graph holds itself.

    A tensor literal is copied fresh at every replay; any other constant is a frozen input.

    Raises:
        ConstantCapturedError: lists every such tensor.
    """
    state = {
        storage_key(leaf): f"{slot.entry.kind} {slot.entry.name}"
        for slot in slots
        for leaf in flatten_tensor(slot.tensor)[0]
    }
    problems = _constants(graph_module, state)
    if not problems:
        return
    # What names a model's state is the module that it is given as.
    remedy = (
        "register them as buffers, pass them as arguments, or give constants='allow'"
        if slots
        else "give the model, trace_step(step, module=model), pass them as arguments, or give "
        "constants='allow'"
    )
    raise ConstantCapturedError(
        "tensors that are neither state nor argument of the step would be frozen into the "
        f"graph; {remedy}:\n  " + "\n  ".join(problems)
    )


def _constants(graph_module: GraphModule, state: Mapping[int, str]) -> list[str]:
    """Describe those of a graph and of its subgraphs; ``state`` tells what lies in a storage."""
    problems: list[str] = []
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, str(node.target), None)
        if isinstance(value, GraphModule):
            problems += [f"{each}, in {node.target}" for each in _constants(value, state)]
        if not isinstance(value, torch.Tensor):
            continue
        if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
            continue
        user = next(iter(node.users))
        where = (user.meta.get("stack_trace") or "").strip().splitlines()
        at = f", first read at {where[-1].strip()!r}" if where else ""
        owner = state.get(storage_key(value))
        of = f", the memory of {owner}, which the step must read from the module" if owner else ""
        problems.append(f"{value.dtype} {list(value.shape)}{of}{at}")
    return list(dict.fromkeys(problems))
