"""Functions that run graphs.

FX writes a call as ``torch.ops.aten.mm.default(...)``. Python then looks up four attributes, and
calls a Python function that calls the operator. On graphs of small operators this takes a seventh
of the host's time. The code that is made here calls the operator directly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.fx import GraphModule

from gt_trace._torch_internals import OpOverload, boxed_code, compiled_function

BoxedFunction = Callable[[list[Any]], Sequence[Any]]
"""A function of a list of inputs, which it empties."""

_CALL = re.compile(r"^( +\w+(?: : [^=\n]+)? = )torch\.ops\.(\w+)\.(\w+)\.(\w+)\(", re.MULTILINE)
"""A statement that calls an overload of an operator, from the beginning of its line."""


def boxed(graph_module: GraphModule) -> BoxedFunction:
    """Return the graph as a function of a list, which it empties, so that inputs are freed early.

    Later edits of the graph do not change the function. It is not an ``nn.Module``: the call of a
    graph module prints an error, and loses the line that raised it.
    """
    code, names = boxed_code(graph_module.graph)
    called: dict[OpOverload, str] = {}

    def direct_call(found: re.Match[str]) -> str:
        statement, namespace, operator, overload = found.groups()
        target = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        if not isinstance(target, OpOverload):
            return found.group()
        # The number tells operators apart: `a_b` of `c`, and `b` of `c_a`.
        name = called.setdefault(target, f"call_{len(called)}_{operator}_{overload}")
        names[name] = target._op
        return f"{statement}{name}("

    return MethodType(compiled_function(_CALL.sub(direct_call, code), names), graph_module)
