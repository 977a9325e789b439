"""Files that somebody edited, with checksums that fit: nothing of them runs, and none hangs."""

from __future__ import annotations

import builtins
import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from step_cases import CASES
from torch.fx import Node

from gt_trace import TracedStep, load, save
from gt_trace.artifacts.container import open_container, write_container
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.step_document import STEP_FORM
from gt_trace.code_text import code_problem
from gt_trace.errors import ArtifactError

_CANARY = "gt_trace_canary"
_RUN = f"setattr(__import__('builtins'),'{_CANARY}',1)"
_SECONDS = 30
_MAX_GROWTH_KIB = 2**20

PAYLOADS = (
    f"x={_RUN}",
    f"x, y={_RUN}",
    f"x\n    {_RUN}",
    f"x\r    {_RUN}\r#",
    f"x);{_RUN};(x",
    f"x = 1), {_RUN}, dict(y",
    f'"""\n{_RUN}\n"""',
    f"#\r{_RUN}\r",
    f"*{_RUN}",
    f"__class__.__init__.__globals__[{_RUN}]",
    "__class__.__init__",
    "__dict__",
    "forward",
    "self",
    "lambda",
    f'x"); {_RUN}; ("',
    f"{{{_RUN}}}",
    f"%s{_RUN}\x0c",
)
"""Texts that run code, or reach into objects, where they are pasted into Python."""

BOMBS: tuple[Any, ...] = (
    ["s", ["Pow", 10, ["Pow", 10, 10]]],
    ["s", ["PowByNatural", 10, ["PowByNatural", 10, 10]]],
    ["s", ["Pow", ["Pow", ["Pow", ["Pow", 10, 16], 16], 16], 16]],
    ["s", ["Mul", *[["Add", "u0", n] for n in range(60)]]],
    ["s", ["Pow", ["Add", "u0", *range(50)], 16]],
    ["s", ["FloorDiv", ["Pow", 7, 10**9], 3]],
    ["s", 10**4000],
    ["by", 0, "x", 10**4000],
    10**4000,
    -(10**300),
    [["t"] * 50] * 50,
    ["t", *[["s", ["Add", "u0", n]] for n in range(300)]],
    ["d", *[[n * (2**61 - 1), 0] for n in range(5_000)]],
    ["z", *[2**40] * 70],
    ["T", 0, 0, 2**63],
    ["r", "Shard", _RUN],
    ["r", "Partial", _RUN],
    ["c", "1e999", "nan"],
    float("inf"),
    {"a": {"b": _RUN}},
    ["d", ["compile_with_inductor", ["d", ["inductor_configs", ["d", ["cpp.cxx", _RUN]]]]]],
)
"""Values that take more time or memory than there is, or whose text is code."""


@dataclass(frozen=True, kw_only=True)
class Original:
    """An artifact and what is in it."""

    path: Path
    module: Any
    document: str
    blobs: dict[str, bytes]
    fingerprint: Any


def _original(name: str, folder: Path) -> Original:
    case = CASES[name]()
    path = folder / "step"
    save(case.step, path)
    with open_container(path, kind="traced step", fingerprint=None) as container:
        blobs = {
            section.name: container.blob(section.name)
            for section in container.sections.values()
            if section.media == "bytes"
        }
        document = json.dumps(container.document("step"))
        return Original(
            path=path,
            module=case.module,
            document=document,
            blobs=blobs,
            fingerprint=container.fingerprint,
        )


class _Edits:
    """Draws an edit of a document: a text, a bomb, a keyword argument, or nodes of arithmetic."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=self._generator))]

    def apply(self, document: Any) -> str:
        nodes = document["content"]["graph"]["nodes"]
        payload = self.draw(PAYLOADS)
        kind = self.draw(("text", "text", "node", "key", "bomb", "bomb", "keyword", "arithmetic"))
        if kind == "text":
            *path, last = self.draw([p for p, each in _places(document) if type(each) is str])
            _at(document, path)[last] = payload
        elif kind == "node":
            self.draw(nodes)[self.draw((1, 2))] = payload
        elif kind == "key":
            *path, last = self.draw([p for p, _ in _places(document) if type(p[-1]) is str])
            holder = _at(document, path)
            holder[payload] = holder.pop(last)
        elif kind == "bomb":
            *path, last = self.draw([p for p, _ in _places(document)])
            _at(document, path)[last] = self.draw(BOMBS)
        elif kind == "keyword":
            self.draw(nodes[:-1])[4].append([payload, 1])
        else:
            _append_arithmetic(document, self.draw(("pow", "squares", "list", "text")))
        return f"{kind} {payload!r}"


def _places(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if path:
        yield path, item
    if not isinstance(item, dict | list):
        return
    for key, each in item.items() if isinstance(item, dict) else enumerate(item):
        yield from _places(each, (*path, key))


def _at(document: Any, path: list[Any]) -> Any:
    for key in path:
        document = document[key]
    return document


def _append_arithmetic(document: Any, kind: str) -> None:
    """Nodes before the output that compute a number, a list or a text that is too large."""
    operators = document["operators"]
    operators += ["operator.pow", "operator.mul", "operator.mod"]
    power, times, modulo = range(len(operators) - 3, len(operators))
    nodes = document["content"]["graph"]["nodes"]
    start = len(nodes) - 1
    made: list[list[Any]] = {
        "pow": [["c", "bomb", power, [10, 10**9], [], []]],
        "squares": [["c", "bomb", times, [2**60, 2**60], [], []]]
        + [
            ["c", f"bomb_{n + 1}", times, [["n", start + n], ["n", start + n]], [], []]
            for n in range(40)
        ],
        "list": [["c", "bomb", times, [["l", 0], 10**12], [], []]],
        "text": [["c", "bomb", modulo, ["%9999999999d", 1], [], []]],
    }[kind]
    nodes[start:start] = made


@contextmanager
def _limits(what: str) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what}: not done after {_SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MAX_GROWTH_KIB, what
    assert not hasattr(builtins, _CANARY), f"{what} ran code"


def _use(step: TracedStep) -> None:
    """Generate all code that FX makes of a graph, and run it on fake tensors."""
    module = step.graph_module
    verbose = module.graph.python_code("self", verbose=True, include_stride=True)
    exec(compile(verbose.src, "verbose", "exec"), dict(verbose.globals))
    module.recompile()
    with step.fake_mode:
        module(*step.example_inputs)


@pytest.mark.parametrize(
    ("name", "num_cases"),
    [
        ("run_time_sizes", 40),
        ("constants", 20),
        *(pytest.param(name, 300, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_an_edited_artifact_runs_nothing_and_hangs_nowhere(
    name: str, num_cases: int, tmp_path: Path
) -> None:
    original = _original(name, tmp_path)
    edits, num_refused = _Edits(seed=0), 0
    for number in range(num_cases):
        document = json.loads(original.document)
        what = f"case {number}: {edits.apply(document)}"
        with _limits(what):
            try:
                write_container(
                    original.path,
                    kind="traced step",
                    fingerprint=original.fingerprint,
                    documents={"step": document},
                    blobs=original.blobs,
                )
                step = load(original.path, original.module)
            except (ArtifactError, ValueError):
                num_refused += 1
                continue
            try:
                _use(step)
            except TimeoutError:
                raise
            except Exception:  # noqa: BLE001  # wrong is what an edited graph may be
                pass
    assert num_refused > num_cases // 2


def _set(position: int, item: int, value: Any) -> Any:
    def edit(document: Any, nodes: Any) -> None:
        nodes[position][item] = value

    return edit


def _with_custom(value: Any) -> Any:
    def edit(document: Any, nodes: Any) -> None:
        document["values"].append(value)
        nodes[2][5].append(["custom", len(document["values"]) - 1])

    return edit


_REFUSALS: dict[str, tuple[Any, str]] = {
    "parameter": (_set(0, 2, f"x={_RUN}"), "its target is .* which is no name that a parameter"),
    "parameter of another": (_set(0, 2, "select"), "'select' of p_weight is a variable of select"),
    "parameter self": (_set(0, 2, "self"), "no name that a parameter of a function can have"),
    "default": (_set(0, 3, [["r", "Shard", _RUN]]), "has arguments that no placeholder has"),
    "output": (_set(-1, 2, f"x;{_RUN}"), "no name that an output has: that is 'output'"),
    "name": (_set(2, 1, "x\n"), "its name is 'x.n', which is no identifier"),
    "keyword": (
        _set(10, 4, [[f"x={_RUN}, y", 1]]),
        "has a keyword argument named .*, which is no parameter of aten.ones_like.default",
    ),
    "keyword of no parameter": (
        _set(10, 4, [["device_", 1]]),
        "has a keyword argument named 'device_', which is no parameter of aten.ones_like.default",
    ),
    "argument": (
        _set(2, 3, [["n", 1], ["r", "Partial", _RUN], 0]),
        "an argument of a node is a Par",
    ),
    "text": (_set(2, 3, [["n", 1], 'x"', 0]), "an argument of a node is the text 'x\"'"),
    "option": (_set(2, 3, [["d", [_RUN, 1]]]), "an option of a node is the text"),
    "integer": (_set(2, 3, [["n", 1], 2**70, 0]), "is no plain value"),
    "comment": (_with_custom(f"x\r{_RUN}"), "a text of metadata has control characters"),
    "compiler": (
        _with_custom(
            ["d", ["compile_with_inductor", ["d", ["inductor_configs", ["d", ["cpp.cxx", "x"]]]]]]
        ),
        r"Inductor's option cpp.cxx='x'; a stored graph may have options that are numbers",
    ),
    "power": (
        lambda document, _: _append_arithmetic(document, "pow"),
        "node 'bomb' computes a number of up to 4000000000 bits; sizes have at most 4096",
    ),
    "squares": (lambda document, _: _append_arithmetic(document, "squares"), "sizes have at most"),
    "list": (lambda document, _: _append_arithmetic(document, "list"), "with what is no number"),
    "size": (
        lambda document, _: document["storages"].__setitem__(2, BOMBS[0]),
        r"a size has the exponent \['Pow', 10, 10\], which is no integer from -16 to 16",
    ),
    "replaced": (
        lambda document, _: document["sizes"].update(replacements=[["u0", ["Add", "u0", 1]]]),
        "the size 'u0' is replaced by an expression of itself",
    ),
}


@pytest.fixture(scope="module")
def run_time_sizes() -> str:
    return json.dumps(STEP_FORM.encode(CASES["run_time_sizes"]().step, MeshAxes.of()).document)


@pytest.mark.parametrize("name", list(_REFUSALS))
def test_refuses_text_that_is_no_name_and_numbers_without_bounds(
    name: str, run_time_sizes: str
) -> None:
    edit, message = _REFUSALS[name]
    document = json.loads(run_time_sizes)
    edit(document, document["content"]["graph"]["nodes"])

    with pytest.raises(ArtifactError, match=message):
        STEP_FORM.decode(document, MeshAxes.of(), blob=lambda name: b"")


@pytest.mark.parametrize("name", ["forward", "__class__", "_modules", "graph", f"x={_RUN}"])
def test_refuses_an_attribute_that_modules_have(name: str) -> None:
    case = CASES["constants"]()
    encoded = STEP_FORM.encode(case.step, MeshAxes.of())
    document = json.loads(json.dumps(encoded.document).replace("_tensor_constant0", name))

    with pytest.raises(ArtifactError, match="an attribute of a stored graph is named"):
        STEP_FORM.decode(document, MeshAxes.of(), blob=encoded.blobs.__getitem__)


def test_a_constant_is_read_once_and_has_its_size() -> None:
    encoded = STEP_FORM.encode(CASES["constants"]().step, MeshAxes.of())
    document = json.loads(json.dumps(encoded.document))
    attributes = document["content"]["graph"]["attributes"]
    attributes["again"] = attributes["_tensor_constant0"]

    with pytest.raises(ArtifactError, match="two attributes are the constant 'constant-0'"):
        STEP_FORM.decode(document, MeshAxes.of(), blob=encoded.blobs.__getitem__)
    del attributes["again"]
    with pytest.raises(ArtifactError, match="the constant 'constant-0' has 10 bytes"):
        STEP_FORM.decode(document, MeshAxes.of(), blob=lambda name: bytes(10))


def test_a_stack_trace_is_stored_as_lines_of_comments() -> None:
    case = CASES["run_time_sizes"]()
    node: Node = next(n for n in case.step.graph_module.graph.nodes if n.op == "call_function")
    node.meta["stack_trace"] = f'File "x", line 1, in f\n    """\r{_RUN}'
    document = json.loads(json.dumps(STEP_FORM.encode(case.step, MeshAxes.of()).document))

    step = STEP_FORM.decode(document, MeshAxes.of(), blob=lambda name: b"")

    (read,) = (n for n in step.graph_module.graph.nodes if n.name == node.name)
    assert read.stack_trace == f"File \"x\", line 1, in f\n    ''' {_RUN}"


def test_names_of_a_captured_graph_are_no_problem() -> None:
    for name in ("constants", "run_time_sizes"):
        assert not any(map(code_problem, CASES[name]().step.graph_module.graph.nodes))
