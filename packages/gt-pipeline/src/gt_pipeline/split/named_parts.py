"""What names mean in a model: which modules a stage keeps, keeps in part, or drops.

A name is that of a module, or of a parameter or buffer that a module owns itself, at any depth.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import accumulate

from torch import nn

_MAX_SHOWN_NAMES = 24


class Fate(Enum):
    """What becomes of a module on one stage."""

    KEPT = "kept, with all it holds"
    PARTIAL = "kept as a shell: only listed children and parameters stay"
    DROPPED = "dropped"


def is_container(module: nn.Module) -> bool:
    """Whether children are entries: it has a length, can be iterated and indexed."""
    return all(hasattr(module, name) for name in ("__len__", "__iter__", "__getitem__"))


def is_bare_container(module: nn.Module) -> bool:
    """Whether it is a container and nothing else: no forward of its own, no tensors.

    ``ModuleList`` and ``ModuleDict``, and what behaves like them; not ``Sequential``.
    """
    if not is_container(module) or type(module).forward is not nn.Module.forward:
        return False
    owned = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not owned and not isinstance(module, nn.ParameterList | nn.ParameterDict)


def lies_in(name: str, names: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``names`` or below one of them."""
    prefixes = set(names)
    return any(prefix in prefixes for prefix in accumulate(name.split("."), "{}.{}".format))


def name_problems(model: nn.Module, names: Sequence[str]) -> list[str]:
    """What is wrong with the names that one stage lists, a sentence each."""
    problems = [
        f"{name!r} is listed {count} times" for name, count in Counter(names).items() if count > 1
    ]
    known = set(names)
    for name in dict.fromkeys(names):
        if not _exists(model, name):
            problems.append(_unknown_name(model, name))
        parent = name.rpartition(".")[0]
        if parent and lies_in(parent, known):
            problems.append(f"{name!r} lies in another name that is listed too")
    return problems


def module_fates(model: nn.Module, names: Sequence[str]) -> dict[str, Fate]:
    """What becomes of each module on the stage that lists ``names``, by qualified name.

    A module that stands under two names has two entries. The model itself, ``""``, is a shell.
    """
    listed = set(names)
    shells = {""}.union(*(accumulate(name.split(".")[:-1], "{}.{}".format) for name in names))
    fates: dict[str, Fate] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent = fates.get(name.rpartition(".")[0]) if name else None
        if name in listed or parent is Fate.KEPT:
            fates[name] = Fate.KEPT
        elif name in shells or (parent is Fate.PARTIAL and is_bare_container(module)):
            fates[name] = Fate.PARTIAL
        else:
            fates[name] = Fate.DROPPED
    return fates


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module by name, one that stands under two names twice."""
    # named_children leaves out the second name, and splitting must see every one.
    return {name: child for name, child in module._modules.items() if child is not None}


def owned_names(module: nn.Module) -> list[str]:
    """What can be named inside a module: its children, parameters and buffers."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return [*children_of(module), *dict(parameters), *dict(buffers)]


def _exists(model: nn.Module, name: str) -> bool:
    # The empty name is the model itself, which is no part of it.
    owner, rest = _deepest_module(model, name)
    return name != "" and (rest == "" or rest in owned_names(owner))


def _unknown_name(model: nn.Module, name: str) -> str:
    owner, rest = _deepest_module(model, name)
    where = name.removesuffix(rest).rstrip(".") or type(model).__name__
    missing = rest.partition(".")[0]
    existing = owned_names(owner)
    # Near a number is any number.
    near = [] if missing.isdigit() else difflib.get_close_matches(missing, existing, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(existing[:_MAX_SHOWN_NAMES]) or "nothing that can be named"
    if len(existing) > _MAX_SHOWN_NAMES:
        shown += f" and {len(existing) - _MAX_SHOWN_NAMES} more"
    return f"there is no {name!r}: {where} has {shown}{hint}"


def _deepest_module(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The deepest module that ``name`` leads to, and what is left of the name."""
    module = model
    rest = name
    while rest:
        head, _, tail = rest.partition(".")
        child = children_of(module).get(head)
        if child is None:
            break
        module, rest = child, tail
    return module, rest
