"""Options judged by the passes of a run: names that do not fit or do nothing, and numerics.

Recipes are values that can be compared (docs/decisions/0020-where-passes-run.md). The mark of a
field in gt-config (``gt_config.readers``) says when an option is read at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gt_config import CompileConfig, Topology, Violation, malformed_options
from gt_config.graph_kinds import GRAPH_KINDS, GraphKind
from gt_config.idle_options import idle, readers_of
from gt_config.numerics import Numerics
from gt_config.option_paths import default_option, flag_of, option_at, option_paths, with_option
from gt_passes import GraphPass, RecipeError, known_passes
from gt_passes.registry import find_passes
from gt_trainer.steps.recipe import ReshardChoice, graphs_of, passes_of

_NAMES = ("passes", "disable_passes")
_BITWISE = "--compile.bitwise"
_EAGER_COMPILES_IT_TOO = "compile-flex-attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options that the recipes of a run are read off."""

    options: CompileConfig
    topology: Topology
    reshard_after_forward: ReshardChoice = "default"
    looks_at_mesh: bool = True
    """Whether passes are left out that find no collective on the axes of this run's mesh."""

    @property
    def graphs(self) -> tuple[GraphKind, ...]:
        """The kinds of graph that the run captures."""
        return graphs_of(self.options, has_pipeline=self.topology.pp > 1)

    def passes(self) -> dict[GraphKind, tuple[GraphPass, ...]]:
        """Return the passes that run on each graph.

        Raises:
            RecipeError: Passes that were added or left out by name do not fit the others.
        """
        found, enabled = {}, replace(self.options, disable_passes=())
        for graph in self.graphs:
            reshard = self.reshard_after_forward
            recipe = passes_of(self.options, graph, reshard_after_forward=reshard)
            whole = passes_of(enabled, graph, reshard_after_forward=reshard)
            found[graph] = tuple(
                each
                for each in recipe
                if self._finds_work(each) and self._has_partner(each, recipe, whole)
            )
        return found

    def without(self, path: str, value: object) -> RunOptions:
        """Return the same run with another value of one option."""
        return replace(self, options=with_option(self.options, path, value))

    def differs_from(self, other: RunOptions) -> bool:
        """Return whether other passes run, or names fit one of the two recipes alone."""
        try:
            return self.passes() != other.passes()
        except RecipeError:
            return True

    def _has_partner(
        self, graph_pass: GraphPass, recipe: Sequence[GraphPass], whole: Sequence[GraphPass]
    ) -> bool:
        """Return whether a pass runs together with those that read or write its annotations.

        Args:
            graph_pass: of ``recipe``. True if it neither writes nor reads annotations.
            recipe: the passes that run.
            whole: the passes that would run if none were disabled.
        """
        if self.options.passes or self.options.autoparallel:
            return True  # added passes and plans may write and read annotations
        readers, name = graph_pass.carried_out_by, graph_pass.name
        if readers:
            return any(each.name in readers for each in recipe)
        return any(name in each.carried_out_by for each in recipe) or not any(
            name in each.carried_out_by for each in whole
        )

    def _finds_work(self, graph_pass: GraphPass) -> bool:
        """Return whether the mesh has collectives for the pass. A plan may add some on any axis."""
        axes = graph_pass.mesh_axes
        if not axes or not self.looks_at_mesh or self.options.autoparallel:
            return True
        return any(getattr(self.topology, axis) > 1 for axis in axes)


def pass_violations(run: RunOptions, *, asked: Collection[str] = ()) -> Iterator[Violation]:
    """Yield the names of passes that do not fit or do nothing, and the options that they disable.

    Args:
        run: Its options. Those that are malformed are left to ``gt_config``.
        asked: Flags that the user typed. Others may lack ranks to act between: a configuration is
            used with any number of them.
    """
    for path in malformed_options(run.options, known_passes=known_passes()):
        run = run.without(path, default_option(type(run.options), path))
    try:
        run.passes()
    except RecipeError as error:
        for path in _NAMES:
            names = option_at(run.options, path)
            problems = [each for each in error.problems if each.startswith((*map(repr, names),))]
            if problems:
                fix = f"drop a name: {'; '.join(problems)}"
                yield Violation(
                    flag=flag_of(f"config.{path}"),
                    value=names,
                    allowed="names that fit the recipe",
                    fix=fix,
                )
        return
    for path in _NAMES:
        names, flag = option_at(run.options, path), flag_of(f"config.{path}")
        run = replace(run, looks_at_mesh=flag in asked)
        for name in names:
            others = tuple(each for each in names if each != name)
            if run.graphs and not run.differs_from(run.without(path, others)):
                allowed = f"to leave it out, since {_why_idle(run, name)} and it would do nothing"
                yield Violation(flag=flag, value=name, allowed=allowed, fix="drop it")
    disabled = run.options.disable_passes
    for path, default in _chosen(run.options) if disabled and run.graphs else ():
        readers = readers_of(type(run.options), path)
        if readers is None or not readers.is_pass:
            continue
        flag = flag_of(f"config.{path}")
        judged = replace(run, looks_at_mesh=flag in asked)
        # Names of passes that only this option adds fit no recipe without it.
        other = judged.without(path, default).without("disable_passes", ())
        fitting = tuple(name for name in disabled if _has(other.passes(), name))
        if judged.differs_from(other.without("disable_passes", fitting)):
            continue
        yield idle(
            flag,
            option_at(run.options, path),
            default,
            because=f"--compile.disable_passes is {disabled!r}",
            remedy="no --compile.disable_passes",
        )


def _chosen(options: CompileConfig) -> Iterator[tuple[str, object]]:
    """Yield the options that differ from their defaults, with the defaults."""
    kind = type(options)
    for path in option_paths(kind):
        default = default_option(kind, path)
        if option_at(options, path) != default:
            yield path, default


def _why_idle(run: RunOptions, name: str) -> str:
    (kind,) = find_passes([name])
    if not kind.runs_on.isdisjoint(run.graphs):
        return "no ranks exchange what it works on" if kind.mesh_axes else "the recipe is the same"
    kinds = ", ".join(each for each in GRAPH_KINDS if each in kind.runs_on)
    return f"it runs on {kinds} alone, and this run has none of these"


def what_changes_bits(run: RunOptions) -> dict[str, Numerics]:
    """Return what of a run may change a bit of an eager one, and how: passes in order, and more.

    Raises:
        RecipeError: Passes that were added or left out by name do not fit the others.
    """
    found: dict[str, Numerics] = {
        each.name: each.numerics
        for passes in run.passes().values()
        for each in passes
        if each.numerics != "bitwise" and each.name != _EAGER_COMPILES_IT_TOO
    }
    return found | dict.fromkeys(_besides_passes(run), "reordered")


def bitwise_violations(options: CompileConfig, topology: Topology) -> Iterator[Violation]:
    """Yield the options that a run with ``--compile.bitwise`` cannot have.

    Passes declare their class of numerics, so that this holds for one that is added later, too.

    Args:
        options: Those of the run.
        topology: That of the run.
    """
    run = RunOptions(options=options, topology=topology)
    if not options.bitwise:
        return
    try:
        found = what_changes_bits(run)
    except RecipeError:
        return  # told elsewhere
    values = {"config": options, "topology": topology}
    for each, numerics in found.items():
        besides = _besides_passes(run).get(each)
        paths = [besides] if besides is not None else _bringing(run, each)
        for path in paths or ["config.bitwise"]:
            root, _, name = path.partition(".")
            neutral = 1 if root == "topology" else default_option(type(options), name)
            yield Violation(
                flag=flag_of(path),
                value=option_at(values[root], name),
                allowed=f"{neutral!r} with {_BITWISE}: {each} is {numerics}",
                fix="leave out one of the two",
            )


def _besides_passes(run: RunOptions) -> Mapping[str, str]:
    """Return what sums in another order and is no pass, with the option that causes it."""
    options, topology = run.options, run.topology
    overlap = options.ep_overlap
    chunks = options.mode == "aot_fx_trace" and overlap.enabled and overlap.strategy == "eager"
    several = topology.pp > 1 and topology.world > topology.pp
    rows = (
        (chunks, "the sum of gradients over chunks", "config.ep_overlap.enabled"),
        (
            "MICROBATCH" in run.graphs,
            "one reduction of several microbatches",
            "config.accumulation",
        ),
        (several, "one reduction of all microbatches of a pipeline", "topology.pp"),
        (options.autoparallel, "a placement that a solver chooses", "config.autoparallel"),
    )
    return {what: path for is_so, what, path in rows if is_so}


def _bringing(run: RunOptions, name: str) -> list[str]:
    """Return the options that add a pass, each by itself."""
    found = ["config.passes"] if name in run.options.passes else []
    unnamed = run.without("passes", ()).without("disable_passes", ())
    for path, default in _chosen(unnamed.options):
        with_it, without = unnamed.passes(), unnamed.without(path, default).passes()
        if _has(with_it, name) and not _has(without, name):
            found.append(f"config.{path}")
    return found


def _has(passes: Mapping[GraphKind, Collection[GraphPass]], name: str) -> bool:
    return any(each.name == name for of_graph in passes.values() for each in of_graph)
