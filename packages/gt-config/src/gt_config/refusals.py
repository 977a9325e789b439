"""The table of what a configuration cannot have together, in the order in which it is reported.

Rows read values that are right by themselves: a row that reads another one is left out, so that one
mistake is reported once. ``c`` is the configuration, ``t`` the topology, also in the texts. Rules
of degrees are those of torchtitan 0.3.0 (``ParallelDims``, and ``Trainer``'s of sequence lengths).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from typing import Any

from gt_config.compile_config import CompileConfig, EpOverlapConfig
from gt_config.errors import SelectorSyntaxError, Violation
from gt_config.idle_options import idle
from gt_config.option_paths import default_option, flag_of, option_at
from gt_config.selectors import (
    MODULE_PATTERN_SYNTAX,
    SELECTOR_SYNTAX,
    SavedOpSelector,
    is_module_pattern,
)
from gt_config.topology import Topology


class WrongValueError(Exception):
    """A row reads a value that is wrong by itself."""


class Sound:
    """Values of a dataclass; reading one that is wrong by itself raises WrongValueError."""

    def __init__(self, values: object, path: str, wrong: Collection[str]) -> None:
        self._values, self._path, self._wrong = values, path, wrong

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        if path in self._wrong:
            raise WrongValueError(path)
        value = getattr(self._values, name)
        return Sound(value, path, self._wrong) if is_dataclass(value) else value


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """A row: a value that a configuration cannot have, and why."""

    path: str
    holds: Callable[[Any, Any], bool]
    """Whether the row refuses a configuration and a topology."""
    allowed: str
    """What is allowed; for a row of ``_idle``, why the option would do nothing."""
    fix: str
    is_idle: bool = False

    def judge(self, c: Any, t: Any) -> Iterator[Violation]:
        """Yield a violation if the row refuses a configuration and a topology."""
        if not self.holds(c, t):
            return
        value = option_at({"config": c, "topology": t}[self.path.split(".")[0]], _name(self.path))
        flag = flag_of(self.path)
        allowed, fix = self.allowed.format(c=c, t=t), self.fix.format(c=c, t=t)
        if not self.is_idle:
            yield Violation(flag=flag, value=value, allowed=allowed, fix=fix)
        elif value != (default := default_option(CompileConfig, _name(self.path))):
            yield idle(flag, value, default, because=allowed, remedy=fix)


def _name(path: str) -> str:
    return path.partition(".")[2]


def _idle(path: str, holds: Callable[[Any, Any], bool], because: str, remedy: str) -> RefusalRow:
    """Return a row that refuses every value but the default, since it would do nothing."""
    return RefusalRow(path, holds, because, remedy, is_idle=True)


_PP = "--parallelism.pipeline_parallel_degree"
_TP = "--parallelism.tensor_parallel_degree"
_EP = "--parallelism.expert_parallel_degree"
_FSDP = ("fsdp_quantized_gathers", "fsdp_second_group", "fsdp_into_dense_regions")
_OF_SEARCH = ("time_limit_seconds", "relative_gap", "simulate_rivals")
_HOST_COPIES = (
    "copies to the host that a compiler has taken into a program go to new memory in every step, "
    "and a CUDA graph replays addresses"
)


def _is_backend(c: Any) -> bool:
    return bool(c.inductor_compilation == "autoparallel_backend")


def _shares_steps(c: Any, t: Any) -> bool:
    """Whether the microbatches of a whole step gather and reduce once."""
    return bool(c.accumulation == "reduce_once" and c.mode == "aot_fx_trace" and t.pp == 1)


def _overlaps(c: Any, **options: object) -> bool:
    """Whether the exchange of tokens is overlapped, with these options."""
    overlap = c.ep_overlap
    return bool(overlap.enabled and all(getattr(overlap, k) == v for k, v in options.items()))


TABLE: tuple[RefusalRow, ...] = (
    # Placement by a solver.
    RefusalRow(
        "config.inductor_compilation",
        lambda c, t: _is_backend(c) and not c.autoparallel,
        "'autoparallel_backend' only with --compile.autoparallel",
        "add --compile.autoparallel, or choose another --compile.inductor_compilation",
    ),
    RefusalRow(
        "config.inductor_compilation",
        lambda c, t: _is_backend(c) and c.mode != "aot_fx_trace",
        "'autoparallel_backend' only with --compile.mode aot_fx_trace: it orders one graph of "
        "forward and backward, and --compile.mode {c.mode} has none",
        "use --compile.mode aot_fx_trace, or choose another --compile.inductor_compilation",
    ),
    RefusalRow(
        "config.mode",
        lambda c, t: c.autoparallel and t.pp > 1 and c.mode == "none",
        f"'aot_fx_trace' with --compile.autoparallel and {_PP} {{t.pp}}: eager stages would gather "
        "parameters and reduce gradients for every microbatch, and are planned as those that do so "
        "once a step",
        "use --compile.mode aot_fx_trace",
    ),
    RefusalRow(
        "config.inductor_compilation",
        lambda c, t: c.autoparallel and t.pp > 1 and _is_backend(c),
        f"another one with {_PP} {{t.pp}}: it orders and compiles a step as a whole, and a stage "
        "is one graph for each action of the schedule",
        f"leave the flag out, or use {_PP} 1",
    ),
    RefusalRow(
        "config.autoparallel_solver.experts",
        lambda c, t: (
            c.autoparallel and c.autoparallel_solver.experts == "expert_parallel" and t.ep == 1
        ),
        f"'expert_parallel' only with {_EP} 2 or more",
        "give the experts an axis, or choose 'any', which may distribute them over another",
    ),
    RefusalRow(
        "config.autoparallel_solver.experts",
        lambda c, t: (
            c.autoparallel and _overlaps(c) and c.autoparallel_solver.experts == "own_tokens"
        ),
        "'any' or 'expert_parallel' with --compile.ep_overlap.enabled: ranks that keep their "
        "tokens exchange none, and there is nothing to overlap",
        "choose expert_parallel, or turn EP overlap off",
    ),
    RefusalRow(
        "config.autoparallel_solver.plan",
        lambda c, t: c.autoparallel_solver.plan is not None and not c.autoparallel,
        "None without --compile.autoparallel: nobody would read it",
        "add --compile.autoparallel, or drop the option",
    ),
    *(
        _idle(
            f"config.autoparallel_solver.{name}",
            lambda c, t: c.autoparallel_solver.plan is not None and c.autoparallel,
            "the plan is that of --compile.autoparallel_solver.plan",
            "no --compile.autoparallel_solver.plan",
        )
        for name in _OF_SEARCH
    ),
    RefusalRow(
        "config.mode",
        lambda c, t: c.autoparallel and c.mode == "aot_joint" and not _is_backend(c),
        "'aot_fx_trace' or 'none' with --compile.autoparallel: the planned forward and backward "
        "are one graph already",
        "use --compile.mode aot_fx_trace",
    ),
    RefusalRow(
        "config.ep_overlap.strategy",
        lambda c, t: c.autoparallel and _overlaps(c) and c.ep_overlap.strategy == "eager",
        "'graph' with --compile.autoparallel: the other cuts the calls of modules, and a placed "
        "model calls none, but runs a planned program",
        "use --compile.ep_overlap.strategy graph",
    ),
    RefusalRow(
        "config.ep_overlap.enabled",
        lambda c, t: c.autoparallel and _overlaps(c) and _is_backend(c),
        "False with --compile.inductor_compilation autoparallel_backend, which orders collectives "
        "and computation of the whole step for itself",
        "turn EP overlap off, or leave --compile.inductor_compilation out",
    ),
    RefusalRow(
        "topology.cp",
        lambda c, t: c.autoparallel and t.cp > 1,
        "1 with --compile.autoparallel: a plan takes whole sequences, and cuts them itself where "
        "that is cheapest",
        f"leave the flag out, and use {_TP} for an axis along which a plan may cut sequences; or "
        "drop --compile.autoparallel",
    ),
    # Options that would do nothing for want of ranks, or where another option decides.
    _idle(
        "config.memory_policy",
        lambda c, t: c.mode == "aot_joint",
        "in --compile.mode aot_joint --compile.joint_partitioner says what is kept",
        "--compile.mode aot_fx_trace",
    ),
    RefusalRow(
        "config.inductor_compilation",
        lambda c, t: (
            c.memory_policy == "offload" and c.cuda_graphs and c.inductor_compilation == "full"
        ),
        f"'none' or 'regional' with offload and CUDA graphs: {_HOST_COPIES}",
        "use regional, another --compile.memory_policy, or leave out --compile.cuda_graphs",
    ),
    RefusalRow(
        "config.regional_modules",
        lambda c, t: (
            c.memory_policy == "offload"
            and c.cuda_graphs
            and c.inductor_compilation == "regional"
            and c.regional_modules
        ),
        f"no modules with offload and CUDA graphs: {_HOST_COPIES}",
        "drop the option, use another --compile.memory_policy, or leave out --compile.cuda_graphs",
    ),
    *(
        _idle(
            f"config.{name}",
            lambda c, t: c.mode != "none" and t.dp_shard * t.cp == 1,
            "no parameter is sharded over data-parallel ranks",
            "a dp_shard degree above 1",
        )
        for name in _FSDP
    ),
    _idle(
        "config.fsdp_into_dense_regions",
        lambda c, t: c.mode != "none" and t.dp_shard * t.cp > 1 and t.ep == 1,
        "no tokens are exchanged between experts",
        "an expert-parallel degree above 1",
    ),
    _idle(
        "config.context_parallel",
        lambda c, t: t.cp == 1,
        "no ranks share a sequence",
        "a context-parallel degree above 1",
    ),
    _idle(
        "config.async_tensor_parallel",
        lambda c, t: c.mode != "none" and t.tp == 1,
        "there is no tensor parallelism",
        "a tensor-parallel degree above 1",
    ),
    # Microbatches that share what they gather and reduce.
    _idle(
        "config.accumulation",
        lambda c, t: c.mode == "aot_fx_trace" and t.pp == 1 and t.gradient_accumulation_steps == 1,
        "a step has one microbatch",
        "a larger --training.global_batch_size",
    ),
    _idle(
        "config.accumulation",
        lambda c, t: (
            c.mode == "aot_fx_trace"
            and t.pp == 1
            and t.gradient_accumulation_steps > 1
            and t.dp_replicate * t.dp_shard * t.cp == 1
            and not (t.tp > 1 and t.sequence_parallel)
        ),
        "no parameter is gathered and no gradient reduced",
        "several data-parallel ranks",
    ),
    RefusalRow(
        "config.accumulation",
        lambda c, t: c.autoparallel and c.accumulation == "reduce_once",
        "'every_microbatch' with --compile.autoparallel: a plan is the cheapest if every "
        "microbatch gathers and reduces as it says",
        "drop one of the two",
    ),
    RefusalRow(
        "config.fsdp_second_group",
        lambda c, t: _shares_steps(c, t) and c.fsdp_second_group,
        "False with --compile.accumulation reduce_once: no microbatch both gathers parameters and "
        "reduces gradients",
        "leave the flag out, or use --compile.accumulation every_microbatch",
    ),
    RefusalRow(
        "config.cuda_graphs",
        lambda c, t: _shares_steps(c, t) and c.cuda_graphs and t.ep > 1,
        f"False with --compile.accumulation reduce_once and {_EP} {{t.ep}}: such a step is one "
        "CUDA graph or none, and how many tokens are exchanged is known on the device alone",
        "leave the flag out, or use --compile.accumulation every_microbatch",
    ),
    RefusalRow(
        "config.require_float8",
        lambda c, t: c.require_float8 and c.bitwise,
        "() with --compile.bitwise: products in 8 bits are approximate",
        "drop one of the two",
    ),
    # Overlap of the exchange of tokens.
    RefusalRow(
        "config.ep_overlap.enabled",
        lambda c, t: _overlaps(c) and c.mode != "aot_fx_trace",
        "True only with --compile.mode aot_fx_trace: it orders one graph of forward and "
        "backward, and --compile.mode {c.mode} has none",
        "use --compile.mode aot_fx_trace, or turn EP overlap off",
    ),
    RefusalRow(
        "config.ep_overlap.enabled",
        lambda c, t: _overlaps(c) and t.ep == 1,
        f"True only with {_EP} above 1; it is {{t.ep}}",
        f"raise {_EP}, or turn EP overlap off",
    ),
    RefusalRow(
        "config.ep_overlap.chunk_dim",
        lambda c, t: _overlaps(c, chunk_dim="seq", module_fqn="layers.*"),
        "'seq' only with --compile.ep_overlap.module_fqn layers.*.moe, not "
        "{c.ep_overlap.module_fqn}: attention needs the whole K/V context",
        "use --compile.ep_overlap.module_fqn 'layers.*.moe', or --compile.ep_overlap.chunk_dim "
        "batch",
    ),
    RefusalRow(
        "config.ep_overlap.num_chunks",
        lambda c, t: _overlaps(c, strategy="eager") and c.ep_overlap.num_chunks != 2,
        "2, with --compile.ep_overlap.strategy eager",
        "use 2 chunks, or --compile.ep_overlap.strategy graph",
    ),
    RefusalRow(
        "config.ep_overlap.disable_early_grad_accumulation",
        lambda c, t: _overlaps(c, strategy="eager", disable_early_grad_accumulation=True),
        "its default False, since the eager strategy never accumulates early",
        "drop the option, or use --compile.ep_overlap.strategy graph",
    ),
    RefusalRow(
        "config.ep_overlap.chunk_dim",
        lambda c, t: (
            _overlaps(c, strategy="graph", chunk_dim="seq") and t.tp > 1 and c.autoparallel
        ),
        f"'batch' with --compile.autoparallel and {_TP} {{t.tp}}: a plan exchanges parts of the "
        "sequence for parts of features between these ranks inside the modules, and what arrives "
        "is no chunk of it",
        f"use --compile.ep_overlap.chunk_dim batch, or {_TP} 1",
    ),
    RefusalRow(
        "config.ep_overlap.strategy",
        lambda c, t: (
            _overlaps(c, strategy="graph", chunk_dim="seq") and t.tp > 1 and not c.autoparallel
        ),
        f"'eager' for chunks of the sequence with {_TP} {{t.tp}}: ranks cut the sequence between "
        "them inside the modules, and a chunk of what they gather is no chunk of what each has",
        f"use eager, --compile.ep_overlap.chunk_dim batch, or {_TP} 1",
    ),
    RefusalRow(
        "config.context_parallel",
        lambda c, t: (
            _overlaps(c, strategy="graph", module_fqn="layers.*")
            and c.context_parallel == "ring"
            and t.cp > 1
        ),
        "'gather' with EP overlap of whole layers by the strategy graph: a ring's message has all "
        "samples in one row, of which no chunk can be told",
        "use gather, --compile.ep_overlap.strategy eager, or --compile.ep_overlap.module_fqn "
        "'layers.*.moe'",
    ),
    RefusalRow(
        "config.inductor_compilation",
        lambda c, t: _overlaps(c) and c.inductor_compilation == "full",
        "'none' or 'regional' with EP overlap: in one program Inductor fuses operators of several "
        "chunks, and then waits for an exchange before it computes what was to hide it",
        "use regional, or turn EP overlap off",
    ),
    # Pipelines.
    RefusalRow(
        "config.mode",
        lambda c, t: t.pp > 1 and c.mode == "aot_joint",
        f"'none' or 'aot_fx_trace' with {_PP} {{t.pp}}: stages are captured with their backward, "
        "or eager",
        f"use aot_fx_trace, or {_PP} 1",
    ),
    RefusalRow(
        "config.fsdp_into_dense_regions",
        lambda c, t: t.pp > 1 and c.fsdp_into_dense_regions,
        f"False with {_PP} {{t.pp}}: gathering and reducing are actions of their own, and the "
        "schedule says when they run",
        f"use False, or {_PP} 1",
    ),
    _idle(  # 0 says when stages wait
        "config.prefetch_layers",
        lambda c, t: t.pp > 1 and c.mode == "aot_fx_trace" and c.prefetch_layers > 0,
        f"{_PP} is {{t.pp}}",
        f"{_PP} 1",
    ),
    RefusalRow(
        "config.cuda_graphs",
        lambda c, t: t.pp > 1 and c.cuda_graphs and c.memory_policy == "offload",
        "False with --compile.memory_policy offload in a pipeline: each microbatch has host memory "
        "of its own, and a CUDA graph copies to one address",
        "leave the flag out, or use another --compile.memory_policy",
    ),
    RefusalRow(
        "config.pipeline_gathered_gib",
        lambda c, t: (
            t.pp > 1 and c.cuda_graphs and t.ep > 1 and c.pipeline_gathered_gib is not None
        ),
        "None with --compile.cuda_graphs and expert parallelism: a step that exchanges tokens is "
        "recorded action by action, and those recordings read gathered parameters at addresses "
        "that stay, so that nothing frees them",
        "leave out one of the two",
    ),
)


def find_refusals(
    c: CompileConfig, t: Topology, *, known_passes: Collection[str], wrong: Collection[str]
) -> Iterator[Violation]:
    """Yield everything that a configuration and a topology cannot have together.

    Args:
        c: The configuration.
        t: The topology.
        known_passes: Every registered pass name.
        wrong: Paths of the values that are wrong by themselves, as ``config.mode``.
    """
    config, topology = Sound(c, "config", wrong), Sound(t, "topology", wrong)
    rules = (
        *(_degrees_multiply_to_world, _ep_divides_the_ranks_it_borrows, _sequence_divides),
        lambda config, topology: wrong_names(config, known_passes=known_passes),
        *(row.judge for row in TABLE),
        _chunks_are_equal,
    )
    for rule in rules:
        try:
            found = [*rule(config, topology)]
        except WrongValueError:
            continue
        yield from found


def _degrees_multiply_to_world(c: Any, t: Any) -> Iterator[Violation]:
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    degrees = {axis: int(getattr(t, axis)) for axis in axes}
    world, product = t.world, math.prod(degrees.values())
    if product == world:
        return
    rest = product // degrees["dp_shard"]
    fix = f"start {product} processes, or change a degree"
    if world % rest == 0:
        fix += f" (for example {flag_of('topology.dp_shard')} {world // rest})"
    terms = " * ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    yield Violation(flag="world size", value=world, allowed=f"{terms} = {product}", fix=fix)


def _ep_divides_the_ranks_it_borrows(c: Any, t: Any) -> Iterator[Violation]:
    ranks = t.dp_shard * t.cp * t.tp
    if ranks % t.ep == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    yield Violation(
        flag=_EP,
        value=t.ep,
        allowed=f"a divisor of dp_shard {t.dp_shard} * cp {t.cp} * tp {t.tp} = {ranks}",
        fix=f"use one of {divisors}, or change the other degrees",
    )


def _sequence_divides(c: Any, t: Any) -> Iterator[Violation]:
    factors = [(t.tp, f"tp {t.tp}")] * bool(t.sequence_parallel and t.tp > 1)
    # The two halves of the sequence go to the ranks in opposite orders, to balance the mask.
    factors += [(2 * t.cp, f"2 * cp {t.cp}")] * bool(t.cp > 1)
    divisor = math.prod(factor for factor, _ in factors)
    if t.seq_len % divisor:
        yield Violation(
            flag=flag_of("topology.seq_len"),
            value=t.seq_len,
            allowed=f"a multiple of {divisor} ({' * '.join(term for _, term in factors)})",
            fix=f"use {_round_up(t.seq_len, divisor)}, or smaller degrees",
        )


def _chunks_are_equal(c: Any, t: Any) -> Iterator[Violation]:
    overlap = c.ep_overlap
    if not overlap.enabled:
        return
    # Chunks are cut from what one rank holds, and context and sequence parallelism shard that.
    shards = 1
    if overlap.chunk_dim == "seq":
        shards = t.cp * (t.tp if t.sequence_parallel else 1)
    samples = "batch_size" if t.pp == 1 else "microbatch_size"
    name = samples if overlap.chunk_dim == "batch" else "seq_len"
    extent: int = getattr(t, name)
    divisor = overlap.num_chunks * shards
    if extent % divisor == 0:
        return
    over = f" on each of {shards} sequence shards" if shards > 1 else ""
    yield Violation(
        flag=flag_of(f"topology.{name}"),
        value=extent,
        allowed=f"a multiple of {divisor}, for {overlap.num_chunks} equal chunks{over}",
        fix=f"use {_round_up(extent, divisor)}{_other_number_of_chunks(overlap, extent, shards)}",
    )


def _other_number_of_chunks(overlap: EpOverlapConfig, extent: int, shards: int) -> str:
    """Return the nearest that cuts the extent into equal chunks, in words; nothing if none does."""
    if overlap.strategy == "eager" or extent % shards:
        return ""
    fitting = [n for n in range(2, extent // shards + 1) if extent % (n * shards) == 0]
    if not fitting:
        return ""
    nearest = min(fitting, key=lambda n: abs(n - overlap.num_chunks))
    return f", or --compile.ep_overlap.num_chunks {nearest}"


def _round_up(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor


def wrong_names(c: Any, *, known_passes: Collection[str]) -> Iterator[Violation]:
    """Yield the names in options that are no selectors, no patterns, or no passes.

    Args:
        c: The configuration.
        known_passes: Every registered pass name.
    """
    for name, is_one, syntax in (
        ("full_recompute_saved_ops", _is_selector, SELECTOR_SYNTAX),
        ("regional_modules", is_module_pattern, MODULE_PATTERN_SYNTAX),
        ("require_float8", is_module_pattern, MODULE_PATTERN_SYNTAX),
    ):
        for text in _given(c, name):
            if not is_one(text):
                yield _of_name(name, text, syntax, "write it in that form")
    known = sorted(known_passes)
    listed = f"the registered passes: {', '.join(known)}" if known else "no pass is registered"
    for option in ("passes", "disable_passes"):
        names = _given(c, option)
        for name in dict.fromkeys(names):
            if name not in known:
                near = " or ".join(map(repr, get_close_matches(name, known)))
                yield _of_name(option, name, listed, f"did you mean {near}?" if near else "drop it")
            if (count := names.count(name)) > 1:
                fix = f"name it once; it is named {count} times"
                yield _of_name(option, name, "each pass once", fix)
    both = "passes that --compile.passes does not name"
    for name in dict.fromkeys(_given(c, "passes")):
        if name in _given(c, "disable_passes"):
            yield _of_name("disable_passes", name, both, "drop it from one of the two")


def _given(c: Any, name: str) -> tuple[str, ...]:
    """Return the names that an option holds; none if its value is no tuple of names."""
    try:
        return tuple(getattr(c, name))
    except WrongValueError:
        return ()


def _is_selector(text: str) -> bool:
    try:
        SavedOpSelector.parse(text)
    except SelectorSyntaxError:
        return False
    return True


def _of_name(option: str, name: str, allowed: str, fix: str) -> Violation:
    return Violation(flag=f"--compile.{option}", value=name, allowed=allowed, fix=fix)
