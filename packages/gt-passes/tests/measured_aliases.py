"""Measures which operators of PyTorch return the memory of their arguments; prints the tables.

Each overload of ATen and prims that writes nothing runs on small arguments made from its schema,
and the storages of arguments and results are compared. Run as a program, it prints what
``gt_passes.analysis.operator_aliases`` holds. A few kernels crash on senseless arguments, so that
they run in a child process.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("aten", "prims")

_LEFT_OUT = (
    *("cuda", "cudnn", "miopen", "mkldnn", "_mps", "mps_", "xla", "pin_memory", "record_stream"),
    *("sparse", "coalesce", "nested", "jagged", "quantize", "q_per", "fbgemm", "hspmm"),
    *("set_data", "from_file", "_assert", "warn", "sleep", "_cufft", "_test_", "_foobar"),
)
"""Parts of names of operators of other devices and layouts, and of what is no operator on data."""

_SIZES: tuple[list[int], ...] = (
    *([2, 3], [3], [1], [0], [1, 1], [0, 0], [0, 1], [1, 0], [2], [4, 4], [1, 3, 4, 4]),
    *([2, 3, 4], [0, 0, 0, 0], [3, 3], [], [1, 2], [6], [-1]),
)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64, torch.bool)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SPECIAL: dict[str, tuple[object, ...]] = {
    "dtype": (*_DTYPES, torch.float32),
    "layout": (None, torch.strided),
    "memory_format": (None, torch.contiguous_format, torch.channels_last),
    "device": (torch.device("cpu"),),
    "pin_memory": (None, False),
}


def overloads() -> Iterator[OpOverload]:
    """Every overload that is measured, in a fixed order."""
    names = {
        (namespace, name, schema.overload_name or "default")
        for schema in torch._C._jit_get_all_schemas()
        for namespace, _, name in [schema.name.partition("::")]
        if namespace in _NAMESPACES and not any(part in name for part in _LEFT_OUT)
    }
    for namespace, name, overload in sorted(names):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(packet, overload, None)
        if not isinstance(found, OpOverload) or found._schema.is_mutable:
            continue
        takes = [str(each.type) for each in found._schema.arguments]
        gives = [str(each.type) for each in found._schema.returns]
        if any("Tensor" in each for each in takes) and any("Tensor" in each for each in gives):
            yield found


def measure(targets: Iterable[OpOverload], *, num_calls: int = 40) -> dict[str, Counter[str]]:
    """What the results of operators shared, by the overload's name.

    Args:
        targets: overloads.
        num_calls: successful calls of each, with other arguments each time.

    Returns:
        By overload: how often a result shared the memory of the argument of that name, or under
        "" of none. Overloads that took none of the arguments are missing.
    """
    pending, found = list(targets), {}
    while pending:
        done = _measured_in_child(pending, num_calls)
        found |= {name: counts for name, counts in done.items() if counts is not None}
        pending = pending[len(done) + 1 :]  # that one crashed
    return found


def _measured_in_child(targets: list[OpOverload], num_calls: int) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        faulthandler.disable()
        with os.fdopen(writer, "wb") as stream:
            for target in targets:
                signal.alarm(10)  # some loop for ever on senseless sizes
                pickle.dump((str(target), _shared(target, num_calls)), stream)
                stream.flush()
        os._exit(0)
    os.close(writer)
    done: dict[str, Any] = {}
    with os.fdopen(reader, "rb") as stream:
        while len(done) < len(targets):
            try:
                name, counts = pickle.load(stream)
            except EOFError:
                break
            done[name] = counts
    os.waitpid(child, 0)
    return done


def _shared(target: OpOverload, num_calls: int) -> Counter[str] | None:
    arguments = target._schema.arguments
    rng = random.Random(str(target))
    torch.manual_seed(0)
    counts: Counter[str] = Counter()
    num_done = 0
    for _ in range(5 * num_calls):
        if num_done == num_calls:
            break
        given = {each.name: _value_of_argument(each, rng) for each in arguments}
        args = [given[each.name] for each in arguments if not each.kwarg_only]
        kwargs = {each.name: given[each.name] for each in arguments if each.kwarg_only}
        try:
            with torch.no_grad():
                results = target(*args, **kwargs)
        except Exception:  # noqa: BLE001 - most arguments make no sense together
            continue
        num_done += 1
        held = {storage: name for name, value in given.items() for storage in _storages(value)}
        counts.update(held.get(storage, "") for storage in _storages(results))
    return counts if num_done else None


def _storages(values: object) -> Iterator[int]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            if storage.nbytes():
                yield storage._cdata


def _value_of_argument(argument: Any, rng: random.Random) -> Any:
    kind, has_default = str(argument.type), argument.has_default_value()
    if has_default and rng.random() < 0.35:
        return argument.default_value
    if argument.name in _SPECIAL:
        value = rng.choice(_SPECIAL[argument.name])
        return argument.default_value if value is None and "Optional" not in kind else value
    return _value_of_type(kind, rng)


def _value_of_type(kind: str, rng: random.Random) -> Any:
    if kind.startswith("Optional["):
        return None if rng.random() < 0.4 else _value_of_type(kind[9:-1], rng)
    if kind == "Tensor":
        return _tensor(rng)
    if kind == "List[Tensor]":
        alike = rng.getrandbits(16)
        return [_tensor(random.Random(alike)) for _ in range(rng.choice([1, 1, 2]))]
    if kind == "List[Optional[Tensor]]":
        return [torch.tensor([0, 1])]
    if kind in ("List[int]", "List[SymInt]"):
        return rng.choice(_SIZES)
    return rng.choice(
        {
            "int": (0, 1, 1, 2, 3, -1, 6),
            "SymInt": (0, 1, 1, 2, 3, -1),
            "bool": (True, False),
            "float": (0.0, 1.0, 0.5),
            "number": (0, 1, 0.5, 2),
            "List[float]": ([1.0], [1.0, 1.0]),
            "List[bool]": ([True], [True, True], [True, True, True]),
            "str": ("ij->ij", "mean", "none"),
            "Device": (torch.device("cpu"),),
        }.get(kind, (None,))
    )


def _tensor(rng: random.Random) -> torch.Tensor:
    shape = rng.choice(([2, 3], [2, 3], [3, 3], [3], [], [1, 3, 4, 4], [2, 3, 4], [2, 3, 4, 5]))
    kind = rng.random()
    if kind < 0.15:
        return torch.ones(shape, dtype=rng.choice(_WHOLE))
    if kind < 0.2:
        return torch.rand(shape) > 0.5
    dtype = torch.float32 if kind < 0.8 else rng.choice(_DTYPES[:4])
    tensor = (torch.rand(shape) + 0.1).to(dtype)
    return tensor.mT.contiguous().mT if kind < 0.3 and len(shape) > 1 else tensor


def tables(found: dict[str, Counter[str]]) -> tuple[dict[str, set[str]], ...]:
    """What always shares, may share, and may copy, each by qualified name without overload."""
    always: dict[str, set[str]] = {}
    sometimes: dict[str, set[str]] = {}
    copies: dict[str, set[str]] = {}
    undeclared = {
        target._schema.name
        for target in overloads()
        if all(each.alias_info is None for each in target._schema.returns)
        and any(name for name in found.get(str(target), ()))
    }
    for target in overloads():
        counts, name = found.get(str(target)), target._schema.name
        if counts is None:
            continue
        shared = {each for each in counts if each}
        if name in undeclared:
            table = sometimes if "" in counts else always
            table.setdefault(name, set()).update(shared)
        elif "" in counts and any(each.alias_info for each in target._schema.returns):
            copies.setdefault(name, set())
    for name in sometimes.keys() & always.keys():
        sometimes[name] |= always.pop(name)
    return always, sometimes, copies


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    measured = measure(overloads(), num_calls=int(sys.argv[1]) if len(sys.argv) > 1 else 40)
    print(len(measured), "overloads of", len(list(overloads())))
    for table in tables(measured):
        print({name: tuple(sorted(shared)) for name, shared in sorted(table.items())})
