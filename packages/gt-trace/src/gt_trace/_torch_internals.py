"""The one place where this package touches PyTorch's private or unstable symbols.

Each has its reason beside it, so that a new PyTorch needs one edit.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

# Keeps torch-function modes out of what runs below the dispatcher, which would call them for every
# attribute of every tensor that fake tensors and DTensors look at.
from torch._C import DisableTorchFunction

# Whether autocast is on for any type of device but mps, in one call: the public question is for one
# type, and looks its name up, which a graph of a few operators notices.
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

# Marks a fake tensor as the conjugate or negative view that the traced one is; a fake tensor is
# made over a plain meta tensor, which loses both.
from torch._C import _set_conj as set_conj
from torch._C import _set_neg as set_neg

# The counter from which autograd nodes get the numbers that ``meta["seq_nr"]`` repeats.
from torch._C._autograd import _get_sequence_nr as sequence_counter

# The tensors that the wrappers of torch.vmap and torch.func hold.
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

# Fake tensors stand in for parameters and inputs while tracing; no public constructor exists.
from torch._guards import TracingContext, tracing

# The classes of operators: plain ones, and those that take functions, as FlexAttention.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
)

# Tensors of a joint graph's capture are of a class of their own; it has no public name.
from torch._subclasses.functional_tensor import FunctionalTensor

# DTensor is public, its constructor over a local tensor and the class of its layouts are not.
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

# FSDP2's placement of a dimension that another axis splits too; there is no public one.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# Makes modules whose code is generated when it is first asked for: that of a graph which is changed
# once more, or is only looked at, is never needed.
from torch.fx._lazy_graph_module import (
    _LazyGraphModule,
    _make_graph_module,
    _use_lazy_graph_module,
)

# make_fx with its recording options is the tracer itself; it has no public name. The proxy mode
# leads to the graph that is being made.
# ``track_tensor`` tells the tracer which node has computed a tensor.
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    make_fx,
    proxy_call,
    track_tensor,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

# Generates code that takes inputs in a list and empties it, so that they are freed while it runs.
from torch.fx.graph import _BoxedCodeGen

# Compiles generated code so that tracebacks show its lines.
from torch.fx.graph_module import _forward_from_src

# What make_fx writes to ``meta["tensor_meta"]``.
from torch.fx.passes.shape_prop import TensorMetadata

# The hooks that run in the calls of all modules. Functions that register them are public; none
# tells which there are.
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

# The tree functions of torch itself: the same registrations as every other torch tracer.
from torch.utils import _pytree as pytree

# Keeps fake tensors' mode out while memory on meta is made.
from torch.utils._mode_utils import no_dispatch

# Says whether a tensor subclass can be taken apart with __tensor_flatten__; and the base of modes
# that see every operator.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement
    from torch.fx import Graph, GraphModule, Node

GLOBAL_HOOKS: dict[str, Mapping[int, Any]] = {
    "forward pre-hooks": _global_forward_pre_hooks,
    "forward hooks": _global_forward_hooks,
    "backward pre-hooks": _global_backward_pre_hooks,
    "backward hooks": _global_backward_hooks,
}
"""PyTorch's own tables of the hooks that run in the calls of all modules, by kinds of hooks."""

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def asks_for_values(error: Exception) -> bool:
    """Whether PyTorch raised it since Python asked for the values of a tensor without data.

    In ``Tensor.numpy()``, and where a size or a format needs a value, it raises no own class.
    """
    of_numpy = ".numpy() is not supported for tensor subclasses"
    of_data = "The tensor has a non-zero number of elements, but its data is not allocated yet"
    return (
        isinstance(error, _DATA_DEPENDENT)
        or str(error).startswith((of_numpy, of_data))
        or (isinstance(error, TypeError) and "FakeTensor" in str(error))
        or "SymIntArrayRef expected to contain only concrete integers" in str(error)
    )


def lacks_fake_kernel(error: Exception) -> bool:
    """Whether an operator has no rule for tensors without data; custom ones raise no own class."""
    return isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh that spans several meshes of one root, as FSDP2 makes it; no public way."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def process_group(name: str) -> Any:
    """The process group of that name, by which functional collectives call it; None without one."""
    resolve: Any = vars(torch.distributed.distributed_c10d)["_resolve_process_group"]
    try:
        return resolve(name)
    except (RuntimeError, KeyError, ValueError):
        return None


def strided_shard(dim: int, *, split_factor: int) -> Placement:
    """Return FSDP2's placement of a dimension that tensor parallelism already splits."""
    return StridedShard(dim, split_factor=split_factor)


def fake_over_meta(
    element: torch.Tensor, mode: FakeTensorMode, device: torch.device, *, dispatch_keys: Any
) -> FakeTensor:
    """Return a fake tensor in the memory of ``element``, a tensor on meta.

    The constructor is private. The public way, ``FakeTensorMode.from_tensor``, makes new memory,
    and views of one memory must stay views of one memory. ``dispatch_keys`` are those of the fake
    tensor that is repeated, which PyTorch tells apart by them.

    Most of the constructor's time goes into arguments in many forms, and stamping makes ten
    thousands of fake tensors. Here PyTorch's own function makes the tensor, and what Python keeps
    in it is what the constructor put into another one.
    """
    name = str(device)
    if name != "cpu" and ":" not in name:  # the constructor finds out which device that is now
        return FakeTensor(mode, element, device, dispatch_keys=dispatch_keys)
    make: Any = torch.Tensor._make_subclass
    made: FakeTensor = make(
        FakeTensor,
        element,
        element.requires_grad,
        dispatch_device=True,
        device_for_backend_keys=device,
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(_kept_in_new_fake(device), fake_mode=mode, dispatch_keys=dispatch_keys)
    return made


@functools.cache
def _kept_in_new_fake(device: torch.device) -> dict[str, Any]:
    """Return what the constructor keeps in a fake tensor of any mode on ``device``."""
    with no_dispatch(), DisableTorchFunction():
        element = torch.empty((0,), device="meta")
        return dict(vars(FakeTensor(FakeTensorMode(), element, device)))


def dtensor_over(local: torch.Tensor, spec: Any) -> DTensor:
    """Return a DTensor with that local part and specification, as DTensor's dispatcher makes one.

    The public ``from_local`` would make a new specification, of which the hash is taken anew.
    """
    make: Any = DTensor
    made: DTensor = make(local, spec, requires_grad=False)
    return made


@functools.cache
def is_functional(func: Any) -> bool:
    """Return whether an operator is one of PyTorch's that writes nothing and draws nothing.

    And whose results have sizes that follow from those of its operands.
    """
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "_c10d_functional"):
        return False
    kinds = torch.Tag
    unlike = (
        kinds.nondeterministic_seeded,
        kinds.dynamic_output_shape,
        kinds.data_dependent_output,
    )
    return not func._schema.is_mutable and not any(kind in func.tags for kind in unlike)


def is_flex_attention(func: Any) -> bool:
    """Return whether ``func`` is FlexAttention's operator, to be found by its name only."""
    if not isinstance(func, HigherOrderOperator):
        return False
    name: str = func.name()  # type: ignore[no-untyped-call]  # torch's
    return name == "flex_attention"


def tensor_indices() -> AbstractContextManager[object]:
    """Inside, a tensor of no dimensions is an index as it is, not a number to be known now.

    FlexAttention runs its functions so, and no public way leads there.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    context: AbstractContextManager[object] = TransformGetItemToIndex()
    return context


def kept_for_backward(node: Any) -> dict[str, Any]:
    """Return what an autograd node keeps in attributes of its context.

    FlexAttention keeps its functions, whose objects say nothing of what they compute, and the graph
    of the derivative, of which the code and the tensors that it reads stand here.
    """
    kept: dict[str, Any] = dict(getattr(node, "__dict__", {}))
    if getattr(custom_function(node), "__name__", "") != "FlexAttentionAutogradOp":
        return kept
    del kept["_fw_graph"], kept["_mask_graph"]
    joint = kept["_joint_graph"]
    if isinstance(joint, torch.nn.Module):
        kept["_joint_graph"] = (joint.code, [*joint.parameters(), *joint.buffers()])
    return kept


def generator_address(generator: torch.Generator) -> int:
    """Return the address of a generator, of which PyTorch makes several Python objects."""
    made: Any = generator
    address: int = made._cdata
    return address


def is_in_backward() -> bool:
    """Return whether autograd's engine runs a backward on this thread; no public way to ask."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def current_sequence_number() -> int:
    """Return the number that ``make_fx`` writes to ``meta["seq_nr"]`` of the next node.

    In a backward that of the autograd node that runs, else that of the last one that was made.
    """
    current = torch.fx.traceback.get_current_meta()
    if current.get("in_grad_fn", 0) > 0:
        number: int = current["grad_fn_seq_nr"][-1]
        return number
    return sequence_counter() - 1


def add_node(
    graph: Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str
) -> Node:
    """Add a node at the end of a graph, whose operands are none but nodes and plain values.

    ``create_node`` searches all operands for raw symbolic sizes, to warn of them. Nodes without any
    are not searched, and are given theirs by what the constructor calls.
    """
    node = graph.create_node(op, target, name=name)
    node._update_args_kwargs(args, kwargs)
    return node


def name_of_new_node(graph: Graph, target: Any) -> str | None:
    """Return what ``make_fx`` has a graph make the name of a node from; None leaves it the graph.

    The graph's own function is private.
    """
    if not isinstance(target, OpOverload):
        return None
    return graph._target_to_str(target.overloadpacket.__name__)


def traced_tensors() -> Any:
    """Return what ``make_fx`` knows of each tensor of the trace; {} without one.

    While an operator runs, ``get_proxy_mode`` returns None.
    """
    made: Any = proxy_tensor._CURRENT_MAKE_FX_TRACER
    return {} if made is None else made.fx_tracer.tensor_tracker


def track(tensor: torch.Tensor, node: Node, tracer: Any) -> None:
    """Let a tracer know that ``node`` computes ``tensor``."""
    track_tensor(tensor, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)


def saved_tensors_hooks() -> tuple[str, ...]:
    """Return the innermost ``saved_tensors_hooks`` in force; no public way to ask.

    Those of PyTorch itself, which store tensors elsewhere and change no values, are left out.
    """
    read: Any = torch._C._autograd._top_saved_tensors_default_hooks
    hooks = read(True) or ()
    return tuple(
        str(each)
        for each in hooks
        if str(getattr(each, "__module__", "")).partition(".")[0] != "torch"
    )


def function_modes() -> tuple[str, ...]:
    """Return names of the ``TorchFunctionMode`` in force, outermost first; no public way to ask.

    Those of this project, which watch captures, are left out.
    """
    count = torch._C._len_torch_function_stack()
    if count == 0:
        return ()
    modes: list[Any] = [torch._C._get_function_stack_at(index) for index in range(count)]
    return tuple(
        f"{type(mode).__name__} {getattr(mode, 'device', '')}".strip()  # that of a default device
        for mode in modes
        if not type(mode).__module__.startswith("gt_")
    )


def kernel_settings() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return how to read and write settings that kernels read; public names take 20 times as long.

    Some are missing before 2.15.
    """
    private: Any = torch._C
    names = {
        "deterministic algorithms": "deterministic_algorithms",
        "filling of empty memory": "deterministic_fill_uninitialized_memory",
        "oneDNN": "mkldnn_enabled",
        "deterministic oneDNN": "mkldnn_deterministic",
        "NNPACK": "nnpack_enabled",
        "cuDNN": "cudnn_enabled",
        "deterministic cuDNN": "cudnn_deterministic",
        "benchmarks of cuDNN": "cudnn_benchmark",
        "float16 sums on CPU": "cpu_allow_fp16_reduced_precision_reduction",
        "float16 sums of cuBLAS": "cublas_allow_fp16_reduced_precision_reduction",
        "bfloat16 sums of cuBLAS": "cublas_allow_bf16_reduced_precision_reduction",
        "float16 accumulation of cuBLAS": "cublas_allow_fp16_accumulation",
        "library of linear algebra": "linalg_preferred_backend",
        "library of products": "blas_preferred_backend",
        "engine of quantized operators": "qengine",
    }
    found = {
        name: (getattr(private, f"_get_{key}"), _set_by(getattr(private, f"_set_{key}")))
        for name, key in names.items()
        if hasattr(private, f"_get_{key}") and hasattr(private, f"_set_{key}")
    }
    for library in ("mkldnn", "cuda"):
        if library == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch's
            continue
        for kind in ("matmul", "conv", "rnn"):
            found[f"float32 precision of {library} {kind}"] = (
                functools.partial(private._get_fp32_precision_getter, library, kind),
                functools.partial(private._set_fp32_precision_setter, library, kind),
            )
    return found


def _set_by(write: Callable[..., object]) -> Callable[[Any], object]:
    """Return a setter of one value, of which some have two parts."""
    return lambda value: write(*value) if isinstance(value, tuple) else write(value)


def below_autograd() -> AbstractContextManager[object]:
    """Inside, operators run without autograd although it is enabled; no public way to say so."""
    context: AbstractContextManager[object] = torch._C._AutoDispatchBelowAutograd()
    return context


def is_derivative_of(kinds: Container[str]) -> bool:
    """Return whether an autograd node of plain tensors runs, of a kind such as "Maximum"."""
    node: Any = torch._C._current_autograd_node()
    if node is None or str(node.name()).rpartition("Backward")[0] not in kinds:
        return False
    for name in dir(node):
        if name.startswith("_saved_"):
            with suppress(Exception):  # checkpointing lets no tensor be read twice
                if is_traceable_wrapper_subclass(getattr(node, name)):
                    return False
    return True


def num_dispatch_modes() -> int:
    """Return how many modes see every operator now, that of fake tensors included."""
    return torch._C._len_torch_dispatch_stack()


def storage_key(tensor: torch.Tensor) -> int:
    """Return what two tensors have in common exactly if they lie in one memory.

    Tensors without data have no address, so that only the identity of the storage tells.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


DEVICE_QUESTION = torch.ops.prim.device.default
"""The operator by which PyTorch asks a fake tensor for its device."""


def asked_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Return the answer if ``func`` is PyTorch asking a fake tensor for its device; else None.

    Autograd asks several times per operator, and dispatches the question as if it were one.
    """
    if func is DEVICE_QUESTION and isinstance(args[0], FakeTensor):
        return args[0].device
    return None


def is_erased(node: Node) -> bool:
    """Return whether a node was taken out of its graph. It still knows what stood before it."""
    return node._erased


def custom_function(node: Any) -> type | None:
    """Return the ``autograd.Function`` that an autograd node is of; None for PyTorch's own."""
    return getattr(node, "_forward_cls", None)


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that run in the backward; no public way to ask."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The pair (pack, unpack) of ``saved_tensors_hooks`` in force; no public way to ask."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def tensor_hooks(tensor: torch.Tensor) -> list[list[Any]]:
    """Return hooks on a tensor, of each kind of which there are any; no public way to ask."""
    held = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [list(hooks.values()) for hooks in held if hooks]


def forget_conclusions(shape_env: ShapeEnv) -> None:
    """Make a shape environment conclude anew, after facts were added to it directly."""
    shape_env._update_version_counter()


def forget_replacement(shape_env: Any, symbol: Any) -> None:
    """Take back what a shape environment has for a symbol since it found the two to be equal."""
    del shape_env.replacements[symbol]
    if hasattr(shape_env, "_replacements_version_counter"):  # torch 2.15
        shape_env._replacements_version_counter += 1
    forget_conclusions(shape_env)


@contextmanager
def inlined_compilation() -> Iterator[None]:
    """Inside, functions that ``torch.compile`` made run as they were while a graph is traced.

    Of models that compile a part of themselves, as FlexAttention, the graph then has what that part
    does; ``make_fx`` refuses them otherwise, and no public setting tells it not to. FlexAttention
    complains of not being compiled, which says nothing of the graph that is made; and it has Dynamo
    read its functions all the same. Left alone, Dynamo makes symbolic what was another size or
    number at an earlier call, and the graph would depend on what was captured before.
    """
    import torch._dynamo

    settings = torch._dynamo.config.patch(
        error_on_nested_fx_trace=False,
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
    )
    # A stance of the caller's, as to run all eagerly, would keep Dynamo from reading those
    # functions: what they close over would be frozen into the graph.
    with warnings.catch_warnings(), settings, torch.compiler.set_stance("default"):
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        with _scores_differentiated_apart():
            yield


@contextmanager
def around_compilations(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Inside, call ``before`` whenever Dynamo begins to compile, and ``after`` when it has ended.

    A thread that compiles at the same time counts too.
    """
    from torch._dynamo.callback import callback_handler

    def begin(_: object) -> None:
        before()

    def end(_: object) -> None:
        after()

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


@contextmanager
def _scores_differentiated_apart() -> Iterator[None]:
    """Inside, hooks for saved tensors see nothing of how FlexAttention differentiates scores.

    It makes the graph of that derivative in its forward. With the hooks of activation checkpointing
    in force, what a score function saves would be unpacked at once, for which the whole layer runs
    again, inside of that small graph and on tensors frozen into it.
    """
    module: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    differentiate = module.create_fw_bw_graph

    def differentiate_apart(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            return differentiate(*args)

    module.create_fw_bw_graph = differentiate_apart
    try:
        yield
    finally:
        module.create_fw_bw_graph = differentiate


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def boxed_code(graph: Graph) -> tuple[str, dict[str, Any]]:
    """Return code of ``forward(self, inputs)``, which empties its list, and its globals."""
    own = graph._codegen
    graph.set_codegen(_BoxedCodeGen())
    try:
        code = graph.python_code("self")
    finally:
        graph.set_codegen(own)
    return code.src, code.globals


def compiled_function(code: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return the function ``forward`` of generated code."""
    return _forward_from_src(code, names)


def compiled_forward(graph_module: GraphModule) -> Callable[..., Any]:
    """Return ``forward`` as of the last ``recompile()``; a lazy module generates it first."""
    _LazyGraphModule.force_recompile(graph_module)
    made: Callable[..., Any] = type(graph_module).forward
    return made


def lazily_generated_code() -> AbstractContextManager[None]:
    """Inside, ``make_fx`` generates no code for the graphs that it makes until it is asked for."""
    context: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return context


def lazy_graph_module(attributes: Mapping[str, Any], graph: Graph, name: str) -> GraphModule:
    """Return a module for ``graph`` whose code is made when needed."""
    with lazily_generated_code():
        return _make_graph_module(dict(attributes), graph, name)


@contextmanager
def flex_attention_on_cpu() -> Iterator[None]:
    """Inside, steps with FlexAttention are traced, and train uncompiled, on CPU tensors.

    So a step for GPUs is captured on a machine without one, where autograd cannot run over fake
    tensors of a CUDA device. PyTorch refuses CPU tensors that need a gradient, because Inductor has
    no backward for them. Nothing public lifts that check, and nothing else stands in the way.
    """
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    check = module._validate_device
    module._validate_device = lambda *_: None
    try:
        yield
    finally:
        module._validate_device = check


def higher_order_operator(name: str) -> HigherOrderOperator:
    """Return FlexAttention's operator, or its backward's, by name; no registry has them."""
    module: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    found: HigherOrderOperator = getattr(module, name)
    return found


def sympy_of_torch() -> Any:
    """Return the module sympy as PyTorch has it: PyTorch needs it, and this package does not."""
    from torch.utils._sympy import functions

    return vars(functions)["sympy"]


def stand_in_symbol(number: int) -> Any:
    """Return a symbol for a size that is not negative, and that no shape environment makes."""
    from torch.utils._sympy.symbol import SymT, make_symbol

    return make_symbol(SymT.UNBACKED_INT, 10**9 + number, integer=True, nonnegative=True)


def set_expression(size: torch.SymInt, expression: Any) -> None:
    """Let a symbolic size stand for another expression, in all tensors that have it.

    Nothing public makes a tensor of symbolic sizes without PyTorch working out facts of their
    expressions, again for each tensor, which takes long where these are long.
    """
    node: Any = size.node
    node._expr, node._expr_cache = expression, None


@functools.cache
def sympy_functions() -> Mapping[str, Any]:
    """Return the functions of which PyTorch makes expressions of sizes, by the names of classes."""
    from torch.utils._sympy import functions

    sympy = sympy_of_torch()

    plain = ("Add", "Mul", "Pow", "Eq", "Ne", "And", "Or", "Not", "Rational")
    relations = ("GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan")
    torch_own = (
        *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt"),
        *("FloorToInt", "CeilDiv", "Max", "Min", "PowByNatural", "FloatPow", "FloatTrueDiv"),
        *("IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt", "ToFloat", "Identity"),
    )
    named = {name: getattr(sympy, name) for name in (*plain, *relations)}
    named |= {"Equality": sympy.Eq, "Unequality": sympy.Ne}
    return named | {
        name: getattr(functions, name) for name in torch_own if hasattr(functions, name)
    }


def known_of_sizes(shape_env: ShapeEnv) -> Any:
    """Return the shape environment as what it is: attributes without public names.

    Those read and written: ``var_to_range``, ``size_like``, ``deferred_runtime_asserts``,
    ``axioms``, ``divisible`` and ``replacements``, as stamping does for a layer's own symbols.
    """
    return shape_env


def backed_sizes(shape_env: ShapeEnv) -> Mapping[Any, Any]:
    """Return the symbols that have a value as an example, with it; named otherwise before 2.14."""
    known: Any = shape_env
    values = getattr(known, "backed_var_to_val", None)
    found: Mapping[Any, Any] = known.var_to_val if values is None else values
    return found


def runtime_assertion(expression: Any, message: str) -> Any:
    """Return an assertion of sizes at run time, as a trace defers it."""
    from torch.fx.experimental.symbolic_shapes import RuntimeAssert
    from torch.utils._traceback import CapturedTraceback

    return RuntimeAssert(expression, message, CapturedTraceback.extract())  # type: ignore[no-untyped-call]  # torch's


def value_range(lower: Any, upper: Any) -> Any:
    """Return the range of a size, ends included."""
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(lower, upper)


@functools.cache
def record_types() -> Mapping[str, tuple[type, tuple[str, ...]]]:
    """Return small classes of which layouts and metadata hold objects, with their fields, by name.

    Placements of DTensor and what it keeps of a whole tensor, the steps of the paths at which a
    value has a size, and what AOTAutograd says of inputs and results; most of them are private.
    """
    from torch._functorch._aot_autograd import descriptors
    from torch.distributed.tensor import Partial, Replicate, Shard, _dtensor_spec
    from torch.fx.experimental import symbolic_shapes

    types: dict[type, tuple[str, ...]] = {
        Shard: ("dim",),
        Replicate: (),
        Partial: ("reduce_op",),
        StridedShard: ("dim", "split_factor"),
        _dtensor_spec.TensorMeta: ("shape", "stride", "dtype"),
        DTensorSpec: tuple(field.name for field in dataclasses.fields(DTensorSpec)),  # in 2.11
        pytree.SequenceKey: ("idx",),
        pytree.MappingKey: ("key",),
        symbolic_shapes.CallMethodKey: ("name",),
        symbolic_shapes.ConvertIntKey: (),
        symbolic_shapes.DivideByKey: ("divisor",),
    }
    order = getattr(_dtensor_spec, "ShardOrderEntry", None)  # not before 2.14
    if order is not None:
        types[order] = ("tensor_dim", "mesh_dims")
    for kind in vars(descriptors).values():
        if isinstance(kind, type) and issubclass(
            kind, descriptors.AOTInput | descriptors.AOTOutput
        ):
            types[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return {kind.__name__: (kind, fields) for kind, fields in types.items()}
