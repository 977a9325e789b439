"""The strings of a graph that FX copies into the Python code that it generates.

``torch.fx.graph.CodeGen`` writes targets, node names and names of keyword arguments unquoted, and
stack traces as comments. In a graph from a file each of these must be a name and nothing else.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from gt_trace._torch_internals import OpOverload

MAX_NAME_CHARACTERS = 1_000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters except tab and newline. A carriage return ends a line of Python."""


def is_code_name(text: object) -> bool:
    """Return whether a value is an ASCII identifier, no keyword, and no ``__special__`` name."""
    return (
        type(text) is str
        and len(text) <= MAX_NAME_CHARACTERS
        and _NAME.fullmatch(text) is not None
        and not keyword.iskeyword(text)
        and not (text.startswith("__") and text.endswith("__"))
    )


def is_comment_text(text: str) -> bool:
    """Return whether lines of text stay comments, or inside a string in triple quotes."""
    return '"""' not in text and _CONTROL.search(text) is None


def comment_text(text: str) -> str:
    """Return the text with whatever ``is_comment_text`` refuses replaced by a blank."""
    return _CONTROL.sub(" ", text).replace('"""', "'''")


def code_problem(node: Node) -> str | None:
    """Return what of a node cannot be pasted into code, in words; None if everything can.

    Values of arguments are not judged: FX writes them by ``repr``.
    """
    op, target = node.op, node.target
    if not is_code_name(node.name):
        return f"its name is {_shown(node.name)}, which is no identifier"
    if op == "output":
        sound = target == "output"
    elif op == "placeholder":
        sound = is_code_name(target) and target != "self"
    elif op == "call_function":
        sound = callable(target)
    else:
        sound = isinstance(target, str) and all(map(_is_attribute, target.split(".")))
    if not sound:
        return f"its target is {_shown(target)}, which is no name that {_ALLOWED[op]}"
    if node.kwargs:
        known = _argument_names(target) if isinstance(target, OpOverload) else None
        for name in node.kwargs:
            if not is_code_name(name) or (known is not None and name not in known):
                return (
                    f"it has a keyword argument named {_shown(name)}, which is no parameter of "
                    f"{_shown(target)}"
                )
    return None


def shadowed_parameter(nodes: Iterable[Node]) -> str | None:
    """Return which two nodes would be one variable of the generated function, in words, if any.

    The parameter of a function is a placeholder's target; every other variable is a node's name.
    """
    names = {node.name: node for node in nodes}
    parameters: dict[object, Node] = {}
    for node in names.values():
        if node.op != "placeholder":
            continue
        other = parameters.setdefault(node.target, names.get(str(node.target), node))
        if other is not node:
            return f"the parameter {node.target!r} of {node.name} is a variable of {other.name} too"
        parameters[node.target] = node
    return None


_ALLOWED = {
    "output": "an output has: that is 'output'",
    "placeholder": "a parameter of a function can have",
    "call_function": "can be called",
    "get_attr": "an attribute of a module can have",
    "call_module": "a submodule can have",
    "call_method": "a method can have",
}


def _is_attribute(part: str) -> bool:
    """Return whether FX can write a part of a path: as a name, or in double quotes."""
    if part.isidentifier():
        return is_code_name(part)
    return bool(part) and '"' not in part and "\\" not in part and part.isprintable()


@functools.cache
def _argument_names(operator: OpOverload) -> frozenset[str]:
    return frozenset(argument.name for argument in operator._schema.arguments)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
