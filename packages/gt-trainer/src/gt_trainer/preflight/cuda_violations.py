"""What would end a run on CUDA devices late: when ranks meet, in the first step, while compiling.

CUDA is not initialised to find out, since ranks may yet be forked from this process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from torch import distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder

from gt_config import Violation
from gt_trainer.decoder.attention import has_document_mask
from gt_trainer.trainer import GraphTrainer

_BFLOAT16_SINCE = 8.0


def cuda_violations(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Yield what would stop the run on the CUDA devices of this machine. Changes nothing.

    Args:
        config: The finished configuration.
    """
    yield from _attention_of_cpus(config)
    yield from _missing_backends(config)
    yield from _bfloat16_unsupported(config)
    yield from _cannot_compile(config)


def _attention_of_cpus(config: GraphTrainer.Config) -> Iterator[Violation]:
    """A ring calls the kernels of DocumentCausalSDPA by name, and those are of CPUs."""
    spec, options = config.model_spec, config.compile
    shares_sequences = config.parallelism.context_parallel_degree > 1
    if spec is None or not has_document_mask(spec.model) or not shares_sequences:
        return
    if options.context_parallel == "ring":
        yield Violation(
            flag="--compile.context_parallel",
            value=options.context_parallel,
            allowed=f"'gather' on cuda for {_model_name(config)}, which attends with "
            "DocumentCausalSDPA: its ring calls kernels of CPUs",
            fix="use gather, or a --config that attends with FlexAttention",
        )


def _missing_backends(config: GraphTrainer.Config) -> Iterator[Violation]:
    if not dist.is_nccl_available():
        yield Violation(
            flag="GT_DEVICE",
            value="cuda",
            allowed="cpu: this PyTorch is built without NCCL, by which CUDA devices communicate",
            fix="install a build of PyTorch for CUDA, or use GT_DEVICE=cpu",
        )
    checkpoint = config.checkpoint
    if (
        checkpoint.enable
        and isinstance(checkpoint, CheckpointManager.Config)
        and checkpoint.async_mode != "disabled"
        and not dist.is_gloo_available()
    ):
        yield Violation(
            flag="--checkpoint.async_mode",
            value=checkpoint.async_mode,
            allowed="'disabled': ranks save beside the training by gloo, which this PyTorch lacks",
            fix="leave the flag out, or install a build of PyTorch with gloo",
        )


def _bfloat16_unsupported(config: GraphTrainer.Config) -> Iterator[Violation]:
    asked = [
        (flag, value)
        for flag, value in (
            ("--training.dtype", config.training.dtype),
            ("--training.mixed_precision_param", config.training.mixed_precision_param),
        )
        if value == "bfloat16"
    ]
    capability = best_compute_capability() if asked else None
    if capability is None or capability >= _BFLOAT16_SINCE:
        return
    for flag, value in asked:
        yield Violation(
            flag=flag,
            value=value,
            allowed=(
                "'float32' on this machine: its devices have compute capability "
                f"{capability} at most, and bfloat16 needs {_BFLOAT16_SINCE}"
            ),
            fix="give float32, or use a newer GPU",
        )


def _cannot_compile(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Inductor's kernels are Triton's, which compiles C to start them."""
    model = config.model_spec.model if config.model_spec is not None else None
    options = config.compile
    if isinstance(model, Decoder.Config) and any(model.traverse(FlexAttention.Config)):
        flag, value = "--config", _model_name(config)
        what = "a model without FlexAttention, which is compiled also when all else runs eagerly"
    elif options.mode != "none" and options.inductor_compilation != "none":
        flag, value = "--compile.inductor_compilation", options.inductor_compilation
        what = "none"
    else:
        return
    missing = _missing_to_compile()
    if missing is not None:
        yield Violation(
            flag=flag, value=value, allowed=f"{what}: {missing[0]}", fix=f"{missing[1]}, and retry"
        )


def _missing_to_compile() -> tuple[str, str] | None:
    """What Inductor needs for CUDA and this machine lacks, and what to do; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Inductor's kernels for CUDA need Triton", "install the package triton"
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler", "install gcc, or name another compiler in CC"
    # Debian's default scheme names a folder that holds no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme)["include"])
    if not (headers / "Python.h").exists():
        return f"Triton needs Python.h in {headers}", "install Python's headers (python3-dev)"
    return None


def best_compute_capability() -> float | None:
    """Return that of this machine's best device, as 9.0; None if the driver's tool does not say."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return max(map(float, re.findall(r"^\d+\.\d+$", said, re.MULTILINE)), default=None)


def _model_name(config: GraphTrainer.Config) -> str:
    assert config.model_spec is not None
    return f"{config.model_spec.name} {config.model_spec.flavor}"
