"""The pass contract: what a pass declares, what it is given, and what it returns.

A pass is a frozen dataclass whose fields are its options. It edits the graph module in place and
returns what it did as data; the manager verifies, recompiles, times and dumps, so that no pass
repeats that. The shape is that of xDSL's ``ModulePass`` (``xdsl/passes.py``), with declared
bounds that a verifier can hold a pass to.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Self

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from gt_config.graph_kinds import EVERY_GRAPH, GRAPH_KINDS, GraphKind, MeshAxis
from gt_config.numerics import NUMERICS, Numerics
from gt_passes._torch_internals import fake_mode_of
from gt_passes.errors import NO_FAKE_VALUES, GraphInputError, PassDeclarationError
from gt_trace import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeBounds:
    """How far a pass may change what the graph costs. The default: no more bytes, no more memory.

    Growth is a fraction of the value before the pass: 0.005 allows half a percent.
    """

    collective_bytes_growth: float = 0.0
    """Bytes that this rank gives to collectives, as a fraction on top."""

    collective_bytes_may_shrink: bool = False
    """Whether the pass may remove collectives. False: a lost collective is an error."""

    peak_memory_growth: float | None = 0.0
    """Estimated peak memory, as a fraction on top. Less than an allocator's block of 512 bytes is
    no growth. None: the pass declares no bound."""

    only_removes: bool = False
    """Whether all that the pass does is to erase nodes: none is new, changed or moved. Nothing is
    then held longer than before, and peak memory need not be estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What passes need to know that the graph itself does not say. Bound when a recipe is built."""

    fake_mode: FakeTensorMode
    """The mode of the fake values in ``node.meta["val"]``: passes that add nodes compute theirs in
    it."""

    static_input_names: tuple[str, ...] = ()
    """Fully qualified names of the parameters and buffers, in the order of the leading
    placeholders that hold them."""

    same_groups: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Maps the name of a process group to that of one with the same ranks in the same order, for
    which passes may use it."""

    num_live_microbatches: int = 1
    """How many runs of the graph hold at once what their forwards saved, before their backwards
    run: the microbatches that are under way in the stage of a pipeline."""

    @classmethod
    def from_graph(
        cls, graph_module: GraphModule, *, static_input_names: tuple[str, ...] = ()
    ) -> Self:
        """The context of a captured graph, with the fake mode found in its nodes.

        Raises:
            GraphInputError: the graph has no fake values, or fewer placeholders than names.
        """
        num_placeholders = len(graph_module.graph.find_nodes(op="placeholder"))
        if len(static_input_names) > num_placeholders:
            raise GraphInputError(
                f"{len(static_input_names)} static input names were given for a graph with "
                f"{num_placeholders} placeholders"
            )
        fake_mode = fake_mode_of(graph_module.graph)
        if fake_mode is None:
            raise GraphInputError(NO_FAKE_VALUES)
        return cls(fake_mode=fake_mode, static_input_names=static_input_names)

    @classmethod
    def of_step(cls, traced: TracedStep) -> Self:
        """The context of a captured step: its fake mode, its parameters and buffers by name."""
        static_inputs = traced.inputs[: traced.num_static_inputs]
        return cls(
            fake_mode=traced.fake_mode,
            static_input_names=tuple(each.name for each in static_inputs),
        )

    @property
    def num_static_inputs(self) -> int:
        """Number of leading placeholders that hold parameters and buffers."""
        return len(self.static_input_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A place that a pass looked at and left alone."""

    node_name: str
    reason: str
    """Why, in words; shown to users."""

    def __str__(self) -> str:
        return f"{self.node_name}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """A report of one pass, as data."""

    changed: bool
    """Whether the graph was edited."""

    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """What was done, by name and in a fixed order: ``{"removed": 12}``. Zeros are left out."""

    refusals: tuple[Refusal, ...] = ()
    """What the pass would have changed and must not, in execution order."""

    @classmethod
    def of(cls, counts: Mapping[str, int], refusals: Sequence[Refusal] = ()) -> Self:
        """The report of a pass that changed the graph if it counted anything."""
        return cls(changed=any(counts.values()), counts=counts, refusals=tuple(refusals))

    def __post_init__(self) -> None:
        happened = {name: count for name, count in self.counts.items() if count}
        object.__setattr__(self, "counts", happened)


class GraphPass(ABC):
    """Base of every pass. Subclasses are frozen dataclasses; their fields are the options.

    A pass may assume a graph of aten operators, functional collectives and higher-order operators
    as ``make_fx`` makes it, with fake values in ``node.meta["val"]`` and one ``output`` node. It
    must be deterministic (the same graph gives the same result on every rank), linear in the
    number of nodes, and must give the nodes it adds the metadata of those they stand for.
    """

    __slots__ = ()

    name: ClassVar[str]
    """Registered name: the class name in kebab-case."""

    numerics: ClassVar[Numerics]
    """How close every output stays to what it was: bitwise, reordered or approximate."""

    runs_on: ClassVar[frozenset[GraphKind]]
    """The kinds of graph that have what the pass works on. The recipes of all others leave it out,
    and an option that acts through such passes alone is refused there."""

    mesh_axes: ClassVar[frozenset[MeshAxis]] = frozenset()
    """The axes of the mesh on whose collectives the pass works; where each has one rank there are
    none, and an option that acts through such passes alone is refused. Empty: any graph has what
    the pass works on."""

    carried_out_by: ClassVar[frozenset[str]] = frozenset()
    """Names of the passes that read the annotations of this pass. An option that acts through this
    pass and those is refused where one side does not run. Empty: the pass changes the graph."""

    only_cleans_up: ClassVar[bool] = False
    """Whether the pass tidies what a capture leaves, rather than carrying out an option. Nobody
    asked for a certain place of it, so what it refuses is not reported to users."""

    keeps_dataflow: ClassVar[bool] = True
    """Whether every output is still computed by the same operators from the same inputs, up to
    layout (views, buckets), copies, order and recomputation. A region counts as the nodes that it
    represents. False: the verifier compares only the order of reads and writes of memory."""

    generates_code: ClassVar[bool] = False
    """Whether the pass puts calls into the graph that only this process and this machine can run:
    compiled kernels, recordings. A graph is stored as it is before the first such pass."""

    @property
    def bounds(self) -> ChangeBounds:
        """How far the pass may change costs; overridden where options decide."""
        return ChangeBounds()

    @abstractmethod
    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Edit ``graph_module.graph`` in place and return what was done.

        The pass does not log, lint, recompile or verify: the manager does.
        """


def check_declaration(pass_class: type[GraphPass]) -> None:
    """Check that a class declares a pass as the contract asks.

    Raises:
        PassDeclarationError: it does not; every problem is listed.
    """
    problems = []
    parameters = vars(pass_class).get("__dataclass_params__")  # its own, not those of a base
    if parameters is None or not parameters.frozen:
        problems.append("it is not a frozen dataclass: write @dataclass(frozen=True, ...)")
    expected_name = _kebab_case(pass_class.__name__)
    name = getattr(pass_class, "name", None)
    if name != expected_name:
        problems.append(f"its name is {name!r}, and its class name asks for {expected_name!r}")
    numerics = getattr(pass_class, "numerics", None)
    if numerics not in NUMERICS:
        problems.append(f"numerics is {numerics!r}, not one of {', '.join(NUMERICS)}")
    runs_on = getattr(pass_class, "runs_on", None)
    if not isinstance(runs_on, frozenset) or not runs_on or not runs_on <= EVERY_GRAPH:
        problems.append(
            f"runs_on is {runs_on!r}, not a frozenset of kinds of graph: some of "
            f"{', '.join(GRAPH_KINDS)}"
        )
    if problems:
        raise PassDeclarationError(pass_class.__qualname__, problems)


def _kebab_case(class_name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", class_name).lower()
