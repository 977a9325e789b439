"""Recipes: which passes run on the graphs of a mode, with what a user added or left out.

A recipe is read off ``gt_config.CompileConfig`` here, once; the passes see their own options only.
What the configuration does not say (how the ranks are connected, where gathered weights go) comes
as arguments from whoever placed the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from torch.fx import GraphModule

from gt_config import CompileConfig, EpOverlapConfig, SavedOpSelector
from gt_config.graph_kinds import GraphKind
from gt_passes.clean_up.canonicalize_views import CanonicalizeViews
from gt_passes.clean_up.merge_waits import MergeWaits
from gt_passes.clean_up.remove_dead_code import RemoveDeadCode
from gt_passes.compilation.compile_flex_attention import CompileFlexAttention
from gt_passes.compilation.compile_regions import CompileRegions
from gt_passes.compilation.compile_whole_graph import CompileWholeGraph
from gt_passes.compilation.inductor_compiler import InductorCompiler, SubgraphCompiler
from gt_passes.contract import GraphPass, PassContext
from gt_passes.cuda_graphs.cuda_graphs import CudaGraphs
from gt_passes.ep_overlap.chunk_modules import ChunkModules
from gt_passes.ep_overlap.schedule_ep_overlap import ScheduleEpOverlap
from gt_passes.ep_overlap.separate_exchange_group import SeparateExchangeGroup
from gt_passes.errors import RecipeError
from gt_passes.fsdp.bucket_all_gathers import BucketAllGathers
from gt_passes.fsdp.bucket_all_reduces import BucketAllReduces
from gt_passes.fsdp.bucket_reduce_scatters import BucketReduceScatters
from gt_passes.fsdp.delay_waits import DelayWaits
from gt_passes.fsdp.prefetch_all_gathers import PrefetchAllGathers
from gt_passes.fsdp.quantize_before_gather import QuantizeBeforeGather
from gt_passes.fsdp.reshard_after_forward import ReshardAfterForward
from gt_passes.fsdp.schedule_fsdp_into_dense_regions import ScheduleFsdpIntoDenseRegions
from gt_passes.fsdp.separate_reduction_group import SeparateReductionGroup
from gt_passes.fsdp.share_all_gathers import ShareAllGathers
from gt_passes.memory_policy.memory_policy_pass import MemoryPolicyPass
from gt_passes.memory_policy.offload_tagged import OffloadTagged
from gt_passes.memory_policy.recompute_tagged import RecomputeTagged
from gt_passes.memory_policy.tag_saved_tensors import TagSavedTensors
from gt_passes.pass_manager import PassManager
from gt_passes.registry import find_passes
from gt_passes.tensor_parallel.async_tensor_parallel import AsyncTensorParallel
from gt_passes.tensor_parallel.fuse_parallel_matmuls import FuseParallelMatmuls
from gt_passes.tensor_parallel.symmetric_memory import SymmetricMemory, SymmetricMemoryHere

_GIB = 2**30


def default_recipe(
    options: CompileConfig | None = None,
    *,
    context: PassContext,
    graph: GraphKind = "STEP",
    reshard_after_forward: bool | None = None,
    compiler: SubgraphCompiler | None = None,
    flex_attention_options: Mapping[str, object] | None = None,
    dump_directory: Path | None = None,
    estimate_peak_bytes: Callable[[GraphModule], int] | None = None,
) -> PassManager:
    """``default_passes``, bound to a captured graph.

    Args:
        options: what the user asks for; None for the defaults.
        context: of the graph to run on.
        graph: the kind of that graph.
        reshard_after_forward: as for ``default_passes``.
        compiler: as for ``default_passes``.
        flex_attention_options: as for ``default_passes``.
        dump_directory: as for ``PassManager``.
        estimate_peak_bytes: as for ``PassManager``.

    Raises what ``default_passes`` raises.
    """
    options = options if options is not None else CompileConfig()
    return PassManager(
        default_passes(
            options,
            graph=graph,
            reshard_after_forward=reshard_after_forward,
            compiler=compiler,
            flex_attention_options=flex_attention_options,
        ),
        context=context,
        verify=options.verify_passes,
        dump_directory=dump_directory,
        estimate_peak_bytes=estimate_peak_bytes,
    )


def default_passes(
    options: CompileConfig,
    *,
    graph: GraphKind,
    reshard_after_forward: bool | None = None,
    compiler: SubgraphCompiler | None = None,
    flex_attention_options: Mapping[str, object] | None = None,
    symmetric_memory: SymmetricMemory | None = None,
) -> tuple[GraphPass, ...]:
    """Which passes run on a kind of graph, with which options, in which order.

    In this order: remove dead code, merge waits, canonicalize views, one all-gather chain per
    parameter, chunks (if overlap of token exchanges is asked for), the memory policy, FSDP
    communication, the overlap itself and its communicator, what rounds differently (if asked for),
    the passes that the user added, compilation. Of these, those that declare to run on ``graph``.

    The result holds nothing of a certain graph, and is equal for requests that mean the same.

    Args:
        options: what the user asks for. Passes named in ``options.passes`` run with their default
            options, after those that rewrite the graph and before compilation; a pass of the recipe
            then runs a second time. A ``MemoryPolicyPass`` among them is the memory
            policy. Already validated (``gt_config.validate``): nothing is judged here but what
            depends on the passes.
        graph: the kind of graph.
        reshard_after_forward: whether FSDP parameters are gathered again for the backward; None:
            unless the memory policy is save_all.
        compiler: compiles regions or the whole graph, if ``options`` ask for it; None for Inductor.
        flex_attention_options: of Inductor, with which the model compiles its FlexAttention when it
            runs eagerly; None if it does not. Not asked for a graph that is compiled as a whole.
        symmetric_memory: knows the groups of async tensor parallelism; None asks this machine.

    Raises:
        UnknownPassError: a name that no registered pass has.
        RecipeError: a pass left out is part of the recipe of no kind of graph, or is added as well;
            a pass added by name has an option without a default; or there is more than one memory
            policy. All of them at once.
    """
    find_passes([*options.passes, *options.disable_passes])  # all unknown names in one error
    classes = find_passes(options.passes)
    problems = [*_unconstructible(classes), *_competing_policies(options, classes)]
    added = [] if problems else [pass_class() for pass_class in classes]
    own_policies = [each for each in added if isinstance(each, MemoryPolicyPass)]
    if reshard_after_forward is None:
        # Whoever keeps every activation has room for the parameters too.
        reshard_after_forward = bool(own_policies) or options.memory_policy != "save_all"
    rewriting = [
        *_clean_up(options),
        *_chunking(options.ep_overlap, graph),
        *(_own_memory_policy(own_policies) if own_policies else _memory_policy(options, graph)),
        *_fsdp(options, graph, reshard_after_forward=reshard_after_forward),
        *_numerics_changing(options, symmetric_memory),
    ]
    compiling = [
        *_flex_attention(options, compiler, flex_attention_options),
        *_compilation(options, graph, compiler or InductorCompiler()),
    ]
    others = [each for each in added if each not in own_policies]
    problems = [
        *_not_in_recipe(options, [each.name for each in (*rewriting, *compiling)]),
        *problems,
    ]
    if problems:
        raise RecipeError(problems)
    return tuple(
        graph_pass
        for graph_pass in (*rewriting, *others, *compiling)
        if graph in graph_pass.runs_on and graph_pass.name not in options.disable_passes
    )


def _clean_up(options: CompileConfig) -> Iterator[GraphPass]:
    yield RemoveDeadCode()
    yield MergeWaits()
    yield CanonicalizeViews()
    # What a plan gathers again for the backward, it gathers again.
    yield ShareAllGathers(scope="phase" if options.autoparallel else "step")


def _chunking(options: EpOverlapConfig, graph: GraphKind) -> Iterator[GraphPass]:
    # Before the memory policy, as chunks that are made before a trace are: each chunk keeps,
    # recomputes and offloads its own.
    if options.enabled and options.strategy == "graph":
        yield ChunkModules(
            module_patterns=(options.module_fqn,),
            chunk_dim=options.chunk_dim,
            num_chunks=options.num_chunks,
            preserve_eager_order=options.disable_early_grad_accumulation,
            may_match_none=graph == "STAGE",
        )


def _memory_policy(options: CompileConfig, graph: GraphKind) -> Iterator[GraphPass]:
    if options.memory_policy == "save_all":
        return
    policy = options.memory_policy
    host_gib = options.offload_host_gib if policy == "offload" else None
    saved_ops = options.full_recompute_saved_ops if policy == "full_recompute" else ()
    # Else what tensor and expert parallelism gather and exchange in a layer would stay.
    recompute_collectives = policy == "full_recompute"
    yield TagSavedTensors(
        policy=policy,
        recompute_collectives=recompute_collectives,
        saved_ops=tuple(map(SavedOpSelector.parse, saved_ops)),
        host_budget_bytes=None if host_gib is None else int(host_gib * _GIB),
    )
    yield RecomputeTagged(recompute_collectives=recompute_collectives)
    if policy == "offload":
        yield OffloadTagged(
            prefetch_layers=options.offload_prefetch_layers,
            defer_layers=options.offload_defer_layers,
            cut_after_forward=graph == "STAGE",
        )


def _own_memory_policy(policies: Sequence[MemoryPolicyPass]) -> Iterator[GraphPass]:
    yield from policies
    yield RecomputeTagged()


def _fsdp(
    options: CompileConfig, graph: GraphKind, *, reshard_after_forward: bool
) -> Iterator[GraphPass]:
    if reshard_after_forward:
        yield ReshardAfterForward()
    if options.fsdp_quantized_gathers:
        yield QuantizeBeforeGather()
    if options.fsdp_bucketing == "transformer_block":
        yield BucketAllGathers(cap_mib=options.fsdp_bucket_cap_mib)
        yield BucketReduceScatters(cap_mib=options.fsdp_bucket_cap_mib)
        yield BucketAllReduces(cap_mib=options.fsdp_bucket_cap_mib)
    if options.prefetch_layers > 0:
        yield DelayWaits()
        yield PrefetchAllGathers(blocks_ahead=options.prefetch_layers)
    if options.fsdp_second_group:
        yield SeparateReductionGroup()
    if options.ep_overlap.enabled:
        # Behind buckets: none may stand between the halves of an exchange.
        yield ScheduleEpOverlap(of_stage=graph == "STAGE")
        yield SeparateExchangeGroup()
    if options.fsdp_into_dense_regions:
        yield ScheduleFsdpIntoDenseRegions()


def _numerics_changing(
    options: CompileConfig, symmetric_memory: SymmetricMemory | None
) -> Iterator[GraphPass]:
    """What rounds differently, each by an option of its own or by ``numerics_changing``."""
    if options.async_tensor_parallel:
        yield AsyncTensorParallel(symmetric_memory=symmetric_memory or SymmetricMemoryHere())
    if options.numerics_changing:
        yield FuseParallelMatmuls()


def _flex_attention(
    options: CompileConfig,
    compiler: SubgraphCompiler | None,
    flex_attention_options: Mapping[str, object] | None,
) -> Iterator[GraphPass]:
    """What is no choice of the user: the model is not run without it eagerly either."""
    if flex_attention_options is None or options.inductor_compilation == "full":
        return
    if compiler is None:
        yield CompileFlexAttention(options=flex_attention_options)
    else:
        yield CompileFlexAttention(options=flex_attention_options, compiler=compiler)


def _compilation(
    options: CompileConfig, graph: GraphKind, compiler: SubgraphCompiler
) -> Iterator[GraphPass]:
    if options.inductor_compilation == "regional":
        yield CompileRegions(
            module_patterns=options.regional_modules,
            memory_bound=not options.regional_modules,
            compiler=compiler,
        )
    if options.inductor_compilation == "full":
        yield CompileWholeGraph(compiler=compiler)
    if options.cuda_graphs:
        yield CudaGraphs(whole=graph == "MICROBATCH")


def _not_in_recipe(options: CompileConfig, in_recipe: Sequence[str]) -> Iterator[str]:
    for name in options.disable_passes:
        if name not in in_recipe:
            yield f"{name!r} is disabled, and the recipe has only {', '.join(in_recipe)}"
    for name in options.disable_passes:
        if name in options.passes:
            yield f"{name!r} is both added and disabled"


def _unconstructible(classes: Sequence[type[GraphPass]]) -> Iterator[str]:
    for pass_class in classes:
        needed = _options_without_default(pass_class)
        if needed:
            yield (
                f"{pass_class.name!r} cannot be added by name, for want of {', '.join(needed)}: "
                "give PassManager an instance"
            )


def _competing_policies(
    options: CompileConfig, classes: Sequence[type[GraphPass]]
) -> Iterator[str]:
    """Each would overwrite what the one before it decided."""
    names = [repr(each.name) for each in classes if issubclass(each, MemoryPolicyPass)]
    if names and options.memory_policy != "save_all":
        names.append(f"--compile.memory_policy {options.memory_policy}")
    if len(names) > 1:
        yield f"{' and '.join(names)} are memory policies, and a graph has one"


def _options_without_default(pass_class: type[GraphPass]) -> list[str]:
    # check_declaration has made sure that a registered pass is a dataclass.
    return [
        option.name
        for option in fields(pass_class)  # type: ignore[arg-type]  # GraphPass itself is none
        if option.default is MISSING and option.default_factory is MISSING
    ]
