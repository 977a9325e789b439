"""What a user can choose about capture and compilation: the flags under ``--compile.``.

The dataclasses hold plain values and check nothing when built, because command-line parsers build
them piece by piece; ``gt_config.validate`` judges the finished configuration together with the
topology. A trainer may subclass ``CompileConfig`` to derive what its own framework reads.

The text under each field is what ``gt-train --help`` shows (tyro reads it from here), so it speaks
to a user, and its lines are short and broken by meaning: tyro keeps the line breaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gt_config.graph_neutral import graph_neutral
from gt_config.readers import NeededValue, read, read_by_passes
from gt_config.topology import MeshAxis

Mode = Literal["none", "aot_fx_trace", "aot_joint"]
CaptureLayers = Literal["auto", "full", "stamped", "compared"]
InductorCompilation = Literal["none", "regional", "full", "autoparallel_backend"]
MemoryPolicy = Literal["save_all", "selective", "selective_alternate", "full_recompute", "offload"]
FsdpBucketing = Literal["off", "transformer_block"]
JointPartitioner = Literal["min_cut", "save_all"]
ShapeChangePolicy = Literal["error", "recapture"]
ExpertPlacement = Literal["any", "expert_parallel", "own_tokens"]
ContextParallelStrategy = Literal["gather", "ring"]
Accumulation = Literal["every_microbatch", "reduce_once"]
ChunkProducer = Literal["eager", "graph"]
EpChunkDim = Literal["batch", "seq"]
EpModuleFqn = Literal["layers.*", "layers.*.moe"]

# What options need so that something reads them.
_CAPTURED = NeededValue(path="config.mode", values=("aot_fx_trace", "aot_joint"))
_TRACED = NeededValue(path="config.mode", values=("aot_fx_trace",))
_JOINT = NeededValue(path="config.mode", values=("aot_joint",))
_RECIPE = NeededValue(path="config.inductor_compilation", values=("none", "regional", "full"))
_REGIONS = NeededValue(path="config.inductor_compilation", values=("regional",))
_SOLVER = NeededValue(path="config.autoparallel", values=(True,))
_OVERLAP = NeededValue(path="config.ep_overlap.enabled", values=(True,))
_BUCKETS = NeededValue(path="config.fsdp_bucketing", values=("transformer_block",))
_OFFLOAD = NeededValue(path="config.memory_policy", values=("offload",))
_LAYERS = NeededValue(path="config.memory_policy", values=("full_recompute",))
_EVERY_MICROBATCH = NeededValue(path="config.accumulation", values=("every_microbatch",))
_ARTIFACTS = NeededValue(path="config.artifacts")
_ONE_STAGE = NeededValue(path="topology.pp", values=(1,))
_STAGES = NeededValue(path="topology.pp")
_SHARED_SEQUENCES = NeededValue(path="topology.cp")
_SHARDS: tuple[MeshAxis, ...] = ("dp_shard", "cp")
_REPLICAS: tuple[MeshAxis, ...] = (*_SHARDS, "dp_replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoParallelConfig:
    """What the solver that chooses placements may do. It acts only with --compile.autoparallel."""

    memory_budget_gib: float | None = field(default=None, metadata=read(_SOLVER))
    """Memory that the plan may use on each rank, in GiB; of a pipeline, all stages of a rank.
    It counts parameters, gradients, optimizer state, saved activations, and what one layer's
    backward computes again: what does not fit otherwise is computed and gathered again.
    None: nine tenths of what the device has; of a dry run, of an H100; on CPUs, of a rank's part of
    the machine's memory."""

    time_limit_seconds: float = field(
        default=120.0,
        metadata=read(_SOLVER)
        | graph_neutral("bounds a search; what was found is told by the plan's own digest"),
    )
    """Stop solving here, and take the best plan so far."""

    relative_gap: float = field(
        default=0.001,
        metadata=read(_SOLVER)
        | graph_neutral("bounds a search; what was found is told by the plan's own digest"),
    )
    """Accept a plan proven to be within this fraction of the optimum."""

    experts: ExpertPlacement = field(default="any", metadata=read(_SOLVER))
    """How routed experts may be placed.
    any: whatever is cheapest.
    expert_parallel: tokens travel to the rank of their experts.
    own_tokens: each rank's tokens stay, and the experts' weights are replicated or gathered.
    expert_parallel needs --parallelism.expert_parallel_degree, which gives it its axis."""

    simulate_rivals: bool = field(default=True, metadata=read(_SOLVER))
    """Simulate the step of the plan that is found, and those of what experts would do: FSDP, with
    tensor or expert parallelism or without. Train with the fastest that fits.
    Of a pipeline the step of the planned stages, and that of the same run without a solver, which
    trains if it is faster by more than 1 %."""

    plan: str | None = field(
        default=None,
        metadata=read(_SOLVER)
        | graph_neutral("says where a plan lies; what it decides is told by its digest"),
    )
    """File of a plan to train with, as placement.json of another run, in place of a search.
    Of a pipeline it holds a plan for each stage. It must be of this model, mesh, batch and machine;
    memory_budget_gib and experts hold for it.
    None: a run that goes on from its checkpoints keeps its plan, and others search for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpOverlapConfig:
    """Overlap of the expert-parallel token exchange with compute, by running modules in chunks."""

    enabled: bool = field(default=False, metadata=read_by_passes(_TRACED, _RECIPE))
    """Hide one chunk's token exchange behind another chunk's compute.
    Needs --compile.mode aot_fx_trace and expert parallelism."""

    num_chunks: int = field(default=2, metadata=read(_TRACED, _OVERLAP))
    """Number of chunks. The eager strategy supports 2 only."""

    chunk_dim: EpChunkDim = field(default="batch", metadata=read(_TRACED, _OVERLAP))
    """Input dimension to split.
    seq needs module_fqn layers.*.moe: attention needs the whole sequence."""

    strategy: ChunkProducer = field(default="graph", metadata=read(_TRACED, _OVERLAP))
    """eager: wrap the modules' forwards before tracing.
    graph: chunk the traced graph."""

    module_fqn: EpModuleFqn = field(default="layers.*", metadata=read(_TRACED, _OVERLAP))
    """Modules to chunk: all transformer blocks, or all MoE blocks."""

    disable_early_grad_accumulation: bool = field(default=False, metadata=read(_TRACED, _OVERLAP))
    """Cast and sum the chunks' gradients in the eager strategy's order.
    For bitwise comparison; costs memory. Graph strategy only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """How the training step is captured, transformed and compiled.

    A configuration is judged by ``gt_config.validate``, never by its constructor.
    """

    mode: Mode = field(default="aot_fx_trace", metadata=read())
    """none: run eagerly, the reference for every comparison.
    aot_fx_trace: capture forward, loss and backward as one graph.
    aot_joint: export a joint graph, cut in forward and backward."""

    inductor_compilation: InductorCompilation = field(
        default="none", metadata=read_by_passes(_CAPTURED)
    )
    """none: run the graph as captured, but for what the model compiles eagerly too: FlexAttention.
    regional: compile what memory bounds: norms, activation functions, casts, sums.
    full: compile the whole graph with Inductor.
    autoparallel_backend: AutoParallel's own policy.
    The last needs --compile.autoparallel and mode aot_fx_trace."""

    regional_modules: tuple[str, ...] = field(
        default=(), metadata=read_by_passes(_CAPTURED, _REGIONS)
    )
    """Modules that regional compiles instead of what memory bounds, as 'layers.*.feed_forward'.
    An asterisk stands for one component of a module's name."""

    autoparallel: bool = field(default=False, metadata=read())
    """Let an exact solver choose every placement."""

    autoparallel_solver: AutoParallelConfig = field(default_factory=AutoParallelConfig)
    """What the solver may do. It acts only with --compile.autoparallel."""

    memory_policy: MemoryPolicy = field(
        default="save_all", metadata=read_by_passes(_TRACED, _RECIPE)
    )
    """What is kept of the forward for the backward.
    save_all: everything.
    selective: what is costly to compute again.
    selective_alternate: of that, but every second matrix product of a layer.
    full_recompute: the inputs of each layer.
    offload: as selective, but kept in host memory."""

    full_recompute_saved_ops: tuple[str, ...] = field(
        default=(), metadata=read_by_passes(_TRACED, _RECIPE, _LAYERS)
    )
    """Results that full_recompute saves all the same.
    Each is MODULE_PATTERN::OP, as 'layers.*.attention::aten.mm'.
    An asterisk stands for one component of a module's name.
    What lies inside a matched module is matched too."""

    offload_host_gib: float | None = field(
        default=None, metadata=read_by_passes(_TRACED, _RECIPE, _OFFLOAD)
    )
    """Host memory that the offload policy may fill on each rank, in GiB.
    None: no limit."""

    offload_prefetch_layers: int = field(
        default=1, metadata=read_by_passes(_TRACED, _RECIPE, _OFFLOAD)
    )
    """Start to bring an offloaded tensor back this many layers ahead of its use."""

    offload_defer_layers: int = field(
        default=1, metadata=read_by_passes(_TRACED, _RECIPE, _OFFLOAD)
    )
    """Wait for a copy to the host this many layers after it was started."""

    joint_partitioner: JointPartitioner = field(default="min_cut", metadata=read(_JOINT))
    """How mode aot_joint cuts the joint graph in forward and backward.
    min_cut: keep the fewest bytes between them, and compute the rest again.
    save_all: compute nothing again."""

    passes: tuple[str, ...] = field(default=(), metadata=read(_CAPTURED, _RECIPE))
    """Names of graph passes to run in addition to the mode's own."""

    disable_passes: tuple[str, ...] = field(default=(), metadata=read(_CAPTURED, _RECIPE))
    """Names of graph passes to leave out."""

    verify_passes: bool = field(default=True, metadata=read(_CAPTURED))
    """Verify the graph after every pass."""

    debug_graph_passes: bool = field(
        default=False,
        metadata=read(_CAPTURED)
        | graph_neutral("reports what each pass did; edits no graph and decides nothing"),
    )
    """Report time, operator counts and memory of every pass.
    Also writes the graph before and after it."""

    fsdp_bucketing: FsdpBucketing = field(
        default="transformer_block", metadata=read_by_passes(_CAPTURED, _RECIPE, axes=_REPLICAS)
    )
    """transformer_block: gather and reduce a block's parameters at once.
    off: gather and reduce each parameter alone."""

    fsdp_bucket_cap_mib: int | None = field(
        default=None, metadata=read_by_passes(_CAPTURED, _BUCKETS, axes=_REPLICAS)
    )
    """Largest bucket in MiB; a larger block gets several. None: no limit."""

    fsdp_quantized_gathers: bool = field(
        default=True, metadata=read_by_passes(_TRACED, _RECIPE, _EVERY_MICROBATCH, axes=_SHARDS)
    )
    """Quantize parameters before they are gathered, which are only read in 8 bits.
    Half of the bytes of bfloat16 are gathered, and one maximum of each is reduced over ranks.
    Where a scale is not of a whole tensor, parameters are gathered as they are."""

    prefetch_layers: int = field(
        default=1, metadata=read_by_passes(_CAPTURED, _RECIPE, axes=_SHARDS)
    )
    """Gather a layer's parameters this many layers ahead of their use.
    0: gather where they are used, and wait for every collective at once."""

    fsdp_second_group: bool = field(
        default=False, metadata=read_by_passes(_CAPTURED, _RECIPE, axes=_REPLICAS)
    )
    """Give reduce-scatters a communicator of their own, to run beside all-gathers."""

    fsdp_into_dense_regions: bool = field(
        default=False, metadata=read_by_passes(_CAPTURED, _RECIPE, _ONE_STAGE, axes=_REPLICAS)
    )
    """Move FSDP communication to where no other communication runs."""

    pipeline_gathered_gib: float | None = field(
        default=None, metadata=read(_TRACED, _STAGES, axes=_SHARDS)
    )
    """Gathered parameters that a rank of a pipeline may hold, in GiB.
    A rank gathers its next stages, three at most, as far as they fit.
    None: whatever three take."""

    pipeline_deferred_weights: int | None = field(default=None, metadata=read(_TRACED, _STAGES))
    """Gradients of weights (dW) that a rank of a pipeline may put off, under a schedule that does.
    Fewer hold less memory, and fill less of the bubble. None: as many as the schedule does."""

    accumulation: Accumulation = field(
        default="every_microbatch", metadata=read(_TRACED, _ONE_STAGE)
    )
    """What the microbatches of a step share (gradient accumulation).
    every_microbatch: each gathers parameters and reduces gradients.
    reduce_once: the first gathers for all, and the last reduces the sum of all.
    The second keeps gathered parameters and whole gradients during a step."""

    async_tensor_parallel: bool = field(
        default=False, metadata=read_by_passes(_CAPTURED, _RECIPE, axes=("tp",))
    )
    """Pipeline tensor-parallel collectives with the matrix products next to them.
    Needs symmetric memory: CUDA devices that reach each other directly."""

    context_parallel: ContextParallelStrategy = field(
        default="gather", metadata=read(_SHARED_SEQUENCES)
    )
    """How a rank attends to tokens of the ranks with which it shares sequences.
    gather: it gathers the keys and values of all of them.
    ring: keys and values go around, each send beside the attention to a block.
    The second holds two blocks at a time and rounds otherwise. Eager steps have it too."""

    ep_overlap: EpOverlapConfig = field(default_factory=EpOverlapConfig)
    """Hide the expert-parallel token exchange behind compute."""

    numerics_changing: bool = field(default=False, metadata=read_by_passes(_CAPTURED, _RECIPE))
    """Also run passes that are faster but round differently."""

    bitwise: bool = field(default=False, metadata=read())
    """Keep every bit of an eager run: a default of the device that is reordered or approximate
    gives way. What is asked for and is one of them is refused."""

    require_float8: tuple[str, ...] = field(
        default=(),
        metadata=read() | graph_neutral("refuses a run, and changes none that starts"),
    )
    """Modules whose linear layers and experts must all multiply in 8 bits, as 'layers.*'.
    A run in which one does not is refused, and says which and why.
    An asterisk stands for one component of a module's name; what lies inside is matched too."""

    cuda_graphs: bool = field(default=False, metadata=read_by_passes(_CAPTURED, _RECIPE))
    """Record the compiled step as CUDA graphs and replay them."""

    capture_layers: CaptureLayers = field(default="auto", metadata=read(_TRACED))
    """full: trace every layer.
    stamped: trace a few layers, and make the others from them.
    Where layers are not proven alike, all are traced, and the log says why. A model that a solver
    placed runs calls and no layers: of equal calls one is traced, and the others are made from it.
    auto: as stamped, of models and pipeline stages deep enough to gain from it.
    compared: stamp, trace in full too, and stop if the two differ.
    Mode aot_fx_trace only."""

    artifacts: str | None = field(
        default=None,
        metadata=read(_CAPTURED)
        | graph_neutral("says where graphs are kept, and never what is in one"),
    )
    """Folder of captured graphs. A start takes from it what was captured for the same run before.
    What is not there is captured once for all ranks that are alike, and written.
    Several jobs may share a folder. None: every rank captures for itself."""

    artifacts_max_gib: float = field(
        default=20.0,
        metadata=read(_CAPTURED, _ARTIFACTS)
        | graph_neutral("says how much is kept, and never what is in a graph"),
    )
    """What the folder may hold, in GiB. Beyond it, what was used least recently goes."""

    on_shape_change: ShapeChangePolicy = field(
        default="error",
        metadata=read(_CAPTURED)
        | graph_neutral("chosen by the caller of a graph; every shape has its own graph"),
    )
    """What to do with an input whose shape is not the captured one.
    error: stop, and name the input and both shapes.
    recapture: capture the step again for the new shape."""
