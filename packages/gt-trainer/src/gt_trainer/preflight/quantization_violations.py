"""What stands in the way of products in 8 bits: in the options, in torchao, in the device.

No product falls back to the run's own precision unseen: a run that asks for what it cannot have is
refused, the table at its start says what is not in 8 bits and why, and ``--compile.require_float8``
refuses a run in which that is one of the modules it names.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterator

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.protocols.model import BaseModel

from gt_config import Violation
from gt_config.selectors import is_inside, is_module_pattern
from gt_trainer.device import installed_device_type
from gt_trainer.preflight.cuda_violations import best_compute_capability
from gt_trainer.quantization.products import (
    FLOAT8_PREFIX,
    MULTIPLES,
    MatrixProduct,
    ProductKind,
    names_in_short,
    products_of,
)
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.trainer import GraphTrainer

_TORCHAO = (0, 18)
"""The minor version of the extra: its MXFP8 and experts are prototypes there."""

_ONE_SCALE = "float8_tensorwise"
"""The precision in which a weight has one scale, by which it can be gathered quantized."""

_ONE_SCALE_IN_BACKWARD = "float8_rowwise_with_gw_hp"
"""In which it has one in the backward alone, and one for each row in the forward."""

_SINCE = {"float8": 8.9, "mxfp8": 10.0}
"""Compute capability from which on NVIDIA's devices multiply so; as torchtitan's converters ask."""

_FLAGS: dict[ProductKind, str] = {
    "linear": "--quantization.linears",
    "experts": "--quantization.experts",
}
_NOUNS: dict[ProductKind, str] = {"linear": "linear layers", "experts": "experts"}
_REQUIRE = "--compile.require_float8"
_DROP = "leave out one of the two"


def quantization_violations(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Yield what is wrong with the ``--quantization.*`` options of a run on whatever machine.

    Args:
        config: The finished configuration. Not changed.
    """
    if config.model_spec is None:
        return
    products = list(products_of(config.model_spec.model, config.quantization))
    yield from _idle_options(config, products)
    yield from _contradictions(config)
    yield from _odd_tokens(config, products)
    for pattern in config.compile.require_float8:
        if is_module_pattern(pattern):  # else it is told elsewhere
            yield from _fallbacks(pattern, products)


def torchao_violations(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Yield what is wrong with the torchao that is installed, if the run needs one.

    Args:
        config: The finished configuration. Not changed.
    """
    if not config.quantization or config.model_spec is None:
        return
    problem = _torchao_problem()
    if problem is None:
        return
    for kind, precision, names in _asked(config, config.model_spec.model):
        yield Violation(
            flag=_FLAGS[kind],
            value=precision,
            allowed=f"'none' here: torchao {problem}, and {len(names)} {_NOUNS[kind]} need it: "
            f"{names_in_short(names)}",
            fix="pip install './packages/gt-trainer[float8]' in a clone, or give "
            f"{_FLAGS[kind]} none to multiply in the run's precision",
        )


def device_violations(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Yield the products for which this machine's devices have no kernel.

    Args:
        config: The finished configuration. Not changed.
    """
    options, spec = config.quantization, config.model_spec
    if not options or options.emulate or spec is None:
        return
    is_cpu = installed_device_type() == "cpu"
    capability = None if is_cpu else best_compute_capability()
    if not is_cpu and capability is None:
        return
    for kind, precision, names in _asked(config, spec.model):
        since = _SINCE[precision.partition("_")[0]]
        if capability is not None and capability >= since:
            continue
        here = "cpu" if is_cpu else f"a device of compute capability {capability}"
        yield Violation(
            flag=_FLAGS[kind],
            value=precision,
            allowed=f"'none' on {here}, which has no kernel for it (NVIDIA's have from {since} "
            f"on), and {len(names)} {_NOUNS[kind]} need one: {names_in_short(names)}",
            fix="give --quantization.emulate to round the same way and multiply in the run's "
            f"precision, or {_FLAGS[kind]} none",
        )


def untraceable_violations(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Yield the products that no capture without a device can be made of; for dry runs.

    Row-wise and tensor-wise scales of linear layers are plain operators, which are captured
    anywhere; MXFP8 and experts cast by kernels, which torchao gives to a GPU alone.

    Args:
        config: The finished configuration. Not changed.
    """
    options, spec = config.quantization, config.model_spec
    if not options or options.emulate or spec is None or installed_device_type() != "cpu":
        return
    for kind, precision, names in _asked(config, spec.model):
        if kind == "linear" and precision.startswith(FLOAT8_PREFIX):
            continue
        yield Violation(
            flag=_FLAGS[kind],
            value=precision,
            allowed="'none' in a capture on a machine without a GPU: torchao casts by kernels "
            f"that only a GPU has, of {len(names)} {_NOUNS[kind]}: {names_in_short(names)}",
            fix="leave the flag out, or capture on a machine with a GPU",
        )


def _asked(
    config: GraphTrainer.Config, model: BaseModel.Config
) -> Iterator[tuple[ProductKind, str, list[str]]]:
    """The kinds of product that are to be in 8 bits: the precision, and the modules' names."""
    options = config.quantization
    products = list(products_of(model, options))
    for kind, precision in _precisions(options):
        names = [each.name for each in products if each.kind == kind and each.why_not is None]
        if precision != "none" and names:
            yield kind, precision, names


def _precisions(options: QuantizationConfig) -> tuple[tuple[ProductKind, str], ...]:
    return ("linear", options.linears), ("experts", options.experts)


def _torchao_problem() -> str | None:
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release == _TORCHAO:
        return None
    return f"{version} is installed, and {'.'.join(map(str, _TORCHAO))} is needed"


def _idle_options(
    config: GraphTrainer.Config, products: list[MatrixProduct]
) -> Iterator[Violation]:
    options = config.quantization
    if options.linears == "none":
        for name in ("only", "skip"):
            if value := getattr(options, name):
                yield Violation(
                    flag=f"--quantization.{name}",
                    value=value,
                    allowed="its default (), since --quantization.linears is none and it would do "
                    "nothing",
                    fix="leave the flag out, or give --quantization.linears a precision",
                )
    if options.emulate and not options:
        yield Violation(
            flag="--quantization.emulate",
            value=True,
            allowed="its default False, since nothing is quantized and it would do nothing",
            fix="leave the flag out, or give --quantization.linears a precision",
        )
    is_gathered_as_it_is = not config.compile.fsdp_quantized_gathers
    with_one_scale = {_ONE_SCALE, *([_ONE_SCALE_IN_BACKWARD] if _gathers_again(config) else [])}
    if is_gathered_as_it_is and all(each.precision not in with_one_scale for each in products):
        yield Violation(
            flag="--compile.fsdp_quantized_gathers",
            value=False,
            allowed="its default True, since no linear layer's weight that is gathered has one "
            "scale and it would do nothing",
            fix=f"leave the flag out, or give --quantization.linears {_ONE_SCALE}",
        )
    for kind, precision in _precisions(options):
        of_kind = [each for each in products if each.kind == kind]
        if precision != "none" and all(each.precision is None for each in of_kind):
            reasons = sorted({each.why_not for each in of_kind if each.why_not})
            yield Violation(
                flag=_FLAGS[kind],
                value=precision,
                allowed=f"'none': the model has no {_NOUNS[kind]} that it would quantize"
                + (f" ({'; '.join(reasons)})" if reasons else ""),
            )
    if options.linears != "none":
        linears = [each.name for each in products if each.kind == "linear"]
        for name in ("only", "skip"):
            for part in getattr(options, name):
                if not any(part in linear for linear in linears):
                    yield Violation(
                        flag=f"--quantization.{name}",
                        value=part,
                        allowed=f"parts of the names of linear layers: {names_in_short(linears)}",
                        fix="correct or drop it",
                    )


def _gathers_again(config: GraphTrainer.Config) -> bool:
    """Whether parameters are gathered for the backward alone, which a stage's are not."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1:
        return False
    if parallelism.fsdp_reshard_after_forward == "default":
        return config.compile.memory_policy != "save_all"
    return parallelism.fsdp_reshard_after_forward == "always"


def _contradictions(config: GraphTrainer.Config) -> Iterator[Violation]:
    options = config.compile
    reasons = (
        (options.bitwise, "bitwise: products in 8 bits are approximate"),
        (
            options.ep_overlap.enabled,
            "ep_overlap.enabled: a scale is a maximum over tokens, and a chunk of them has another",
        ),
        (
            options.autoparallel,
            (
                "autoparallel: a scale is a maximum over a tensor, and no rule says what that "
                "costs of one that is sharded"
            ),
        ),
    )
    for kind, value in _precisions(config.quantization):
        for is_set, reason in reasons:
            if is_set and value != "none":
                allowed = f"'none' with --compile.{reason}"
                yield Violation(flag=_FLAGS[kind], value=value, allowed=allowed, fix=_DROP)


def _odd_tokens(config: GraphTrainer.Config, products: list[MatrixProduct]) -> Iterator[Violation]:
    """Gradients of weights are products over tokens, in blocks of so many."""
    training, parallelism = config.training, config.parallelism
    is_pipelined = parallelism.pipeline_parallel_degree > 1
    num_samples = (
        parallelism.pipeline_parallel_microbatch_size if is_pipelined else training.local_batch_size
    )
    # Of a sequence that ranks share, a layer multiplies a rank's part.
    parts = parallelism.context_parallel_degree
    has_head = any(each.name == "lm_head" and each.precision is not None for each in products)
    if has_head and isinstance(config.loss, ChunkedLossWrapper.Config):
        parts *= config.loss.num_chunks
    num_tokens = num_samples * training.seq_len // parts
    linears = config.quantization.linears
    multiple = MULTIPLES.get(linears.partition("_")[0], 1)
    if num_tokens % multiple:
        yield Violation(
            flag="--training.seq_len",
            value=training.seq_len,
            allowed=f"one with which the {num_tokens} tokens that a layer multiplies at once are a "
            f"multiple of {multiple}, as gradients of weights need with --quantization.linears "
            f"{linears}",
            fix=f"use a multiple of {multiple * parts // math.gcd(num_samples, multiple * parts)}",
        )


def _fallbacks(pattern: str, products: list[MatrixProduct]) -> Iterator[Violation]:
    required = [each for each in products if is_inside(each.name, pattern)]
    if not required:
        yield Violation(
            flag=_REQUIRE,
            value=pattern,
            allowed="modules with linear layers or experts, which are "
            f"{names_in_short(each.name for each in products)}",
            fix="correct or drop it",
        )
    fallen: dict[str, list[str]] = {}
    for each in required:
        if each.why_not is not None:
            fallen.setdefault(each.why_not, []).append(each.name)
    if fallen:
        told = "; ".join(f"{names_in_short(names)} ({why})" for why, names in fallen.items())
        yield Violation(
            flag=_REQUIRE,
            value=pattern,
            allowed=f"modules that multiply in 8 bits, and these do not: {told}",
            fix="quantize them (--quantization.linears, --quantization.experts), or name fewer",
        )
