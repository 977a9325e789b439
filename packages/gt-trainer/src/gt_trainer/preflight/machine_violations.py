"""What this machine cannot give a run: devices, memory, text, a tokenizer, folders, checkpoints.

A dry run asks none of this.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from gt_config import Topology, Violation
from gt_trainer.data.document_files import TextSourceError
from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.data.text_dataloader import StdlibTextDataLoader
from gt_trainer.data.text_source import TextSource
from gt_trainer.decoder.attention import has_document_mask
from gt_trainer.device import available_memory_bytes, installed_device_type
from gt_trainer.preflight.checkpoint_folder import check_checkpoints
from gt_trainer.preflight.cuda_violations import cuda_violations
from gt_trainer.preflight.quantization_violations import device_violations
from gt_trainer.step_folders import newest_checkpoint
from gt_trainer.trainer import GraphTrainer

_LONGEST_NAME = 255


def machine_violations(
    config: GraphTrainer.Config, topology: Topology, *, num_local_ranks: int | None
) -> Iterator[Violation]:
    """Yield what would stop the run on this machine. Changes nothing.

    Args:
        config: The finished configuration.
        topology: Its extents.
        num_local_ranks: Ranks that will share this machine's devices; None if unknown.
    """
    yield from _missing_devices(num_local_ranks)
    if installed_device_type() == "cuda":
        yield from cuda_violations(config)
    yield from _options_for_another_device(config)
    yield from _missing_packages(config)
    yield from device_violations(config)
    yield from _masks_exceed_memory(config, num_local_ranks or 1, context_parallel=topology.cp)
    num_readers = topology.dp_replicate * topology.dp_shard
    yield from _unusable_folders(config, num_readers)
    yield from _missing_weights(config)
    yield from _unusable_tokenizer(config)
    tokens_of_reader = config.training.local_batch_size * config.training.seq_len
    sections = [("--dataloader", config.dataloader)]
    if config.validator.enable:
        sections.append(("--validator.dataloader", config.validator.dataloader))
    for section, dataloader in sections:
        yield from _unusable_text(
            section, dataloader, num_readers, tokens_of_reader=tokens_of_reader
        )


def _missing_devices(num_local_ranks: int | None) -> Iterator[Violation]:
    if num_local_ranks is None or installed_device_type() == "cpu":
        return
    num_devices = torch.accelerator.device_count()
    if num_local_ranks > num_devices:
        yield Violation(
            flag="--nproc",
            value=num_local_ranks,
            allowed=f"at most {num_devices}, one process for each {installed_device_type()} device",
            fix="use fewer processes, or GT_DEVICE=cpu",
        )


def _missing_packages(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Refuse what the log alone would say: torchtitan goes on without Weights & Biases."""
    if config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield Violation(
            flag="--metrics.enable_wandb",
            value=True,
            allowed="False: the package wandb is not installed",
            fix="install wandb, or drop the option",
        )


def _options_for_another_device(config: GraphTrainer.Config) -> Iterator[Violation]:
    if installed_device_type() != "cpu":
        return
    if getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem":
        yield Violation(
            flag="--checkpoint.async_mode",
            value="async_with_pinned_mem",
            allowed="'disabled' or 'async' on cpu: pinned memory is that of copies from a device",
            fix="choose one of these",
        )
    for name, needs in (
        ("cuda_graphs", "CUDA graphs record the work of a CUDA device"),
        ("async_tensor_parallel", "it needs symmetric memory between CUDA devices"),
    ):
        if getattr(config.compile, name) is True:
            yield Violation(
                flag=f"--compile.{name}",
                value=True,
                allowed=f"False on cpu: {needs}",
            )
        added = name.replace("_", "-")
        if added in config.compile.passes:
            yield Violation(
                flag="--compile.passes",
                value=added,
                allowed=f"not {added} on cpu: {needs}",
                fix="drop the name",
            )


def _masks_exceed_memory(
    config: GraphTrainer.Config, num_ranks: int, *, context_parallel: int
) -> Iterator[Violation]:
    """A mask of all pairs of tokens can be more than there is, and the system ends such a run.

    Counted is the mask and the copy of it, in the dtype of the scores, that the kernel reads.
    Weights and other activations come on top.
    """
    training = config.training
    model = config.model_spec.model if config.model_spec is not None else None
    if not has_document_mask(model):
        return
    bytes_per_pair = 1 + TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
    num_samples = num_ranks * training.local_batch_size
    needed = num_samples * training.seq_len**2 * bytes_per_pair // context_parallel
    available = available_memory_bytes()
    if needed <= available:
        return
    fits = math.isqrt(available * context_parallel // (num_samples * bytes_per_pair))
    shared = f" / context_parallel_degree {context_parallel}" if context_parallel > 1 else ""
    yield Violation(
        flag="--training.seq_len",
        value=training.seq_len,
        allowed=(
            f"attention masks that fit into memory: they take {needed / 2**30:.1f} GiB "
            f"({num_ranks} rank(s) x local_batch_size {training.local_batch_size} x seq_len^2 x "
            f"{bytes_per_pair} bytes{shared}), and {available / 2**30:.1f} GiB are available"
        ),
        fix=f"use at most {2 ** (fits.bit_length() - 1)}, or fewer samples or ranks",
    )


def _unusable_folders(config: GraphTrainer.Config, num_readers: int) -> Iterator[Violation]:
    if filesystem.is_remote(config.dump_folder):
        yield Violation(
            flag="--dump_folder",
            value=config.dump_folder,
            allowed="a folder of this machine: logs and metrics are written as they come",
            fix="choose one; --checkpoint.folder may be on a remote file system",
        )
        return
    unwritable = _why_unwritable(config.dump_folder)
    if unwritable is not None:
        yield Violation(
            flag="--dump_folder",
            value=config.dump_folder,
            allowed="a folder that can be made and written",
            fix=f"{unwritable}: choose another folder",
        )
        return
    graphs = config.compile.artifacts
    # One that is there may be there to be read alone.
    if graphs is not None:
        unwritable = "it is empty" if not graphs.strip() else _why_unwritable(graphs)
        if filesystem.is_remote(graphs):
            unwritable = "it is written as a folder of this machine"
        elif unwritable is not None and _is_folder(graphs):
            unwritable = None
        if unwritable is not None:
            yield Violation(
                flag="--compile.artifacts",
                value=graphs,
                allowed="a folder, or one that can be made",
                fix=f"{unwritable}: choose another folder",
            )
    for flag, value, is_used in _written_folders(config):
        unwritable = _why_unwritable(filesystem.join(config.dump_folder, value))
        if filesystem.is_remote(value) and flag != "--checkpoint.folder":
            unwritable = "it is written as a folder of this machine"
        if is_used and unwritable is not None:
            yield Violation(
                flag=flag,
                value=value,
                allowed="a folder that can be made and written, in the dump folder or absolute",
                fix=f"{unwritable}: choose another folder",
            )
    yield from _unwritable_settings(config)
    if config.checkpoint.enable and _why_unwritable(
        filesystem.join(config.dump_folder, config.checkpoint.folder)
    ):
        return
    if config.checkpoint.enable:
        yield from check_checkpoints(
            config.checkpoint,
            Path(config.dump_folder),
            spec=config.model_spec,
            num_steps=config.training.steps,
            num_readers=num_readers,
        )


def _unwritable_settings(config: GraphTrainer.Config) -> Iterator[Violation]:
    settings = config.debug.save_config_file
    if settings is None:
        return
    path = Path(config.dump_folder, settings)
    if filesystem.is_remote(settings):
        why: str | None = "it is written as a file of this machine"
    elif not (why := _why_unwritable(str(path))) and path.is_dir():
        why = f"{path} is a folder"
    elif path.is_file():
        return
    if why is not None:
        yield Violation(
            flag="--debug.save_config_file",
            value=settings,
            allowed="a file that can be made and written, in the dump folder or absolute",
            fix=f"{why}: choose another name",
        )


def _missing_weights(config: GraphTrainer.Config) -> Iterator[Violation]:
    """Without a path, weights in Hugging Face's form are read from beside the tokenizer."""
    checkpoint, spec = config.checkpoint, config.model_spec
    initial = checkpoint.initial_load_path
    if checkpoint.enable and initial is not None and filesystem.is_remote(initial):
        unreachable = _why_unreachable(initial)
        if unreachable is not None:
            yield Violation(
                flag="--checkpoint.initial_load_path",
                value=initial,
                allowed="a folder that this machine can read",
                fix=f"{unreachable}: install it, or choose another folder",
            )
    if not checkpoint.enable or not checkpoint.initial_load_in_hf:
        return
    if newest_checkpoint(Path(config.dump_folder) / checkpoint.folder) is not None:
        return
    why = None
    if spec is not None and spec.state_dict_adapter is None:
        why = f"{spec.name} has no state_dict_adapter"
    elif (
        checkpoint.initial_load_path is None
        and not filesystem.is_remote(config.hf_assets_path)
        and not any(Path(config.hf_assets_path).glob("*.safetensors"))
    ):
        why = f"no .safetensors file is in --hf_assets_path {config.hf_assets_path}"
    if why is not None:
        yield Violation(
            flag="--checkpoint.initial_load_in_hf",
            value=True,
            allowed=f"False: {why}",
            fix="use --checkpoint.initial_load_path FOLDER, or drop the option",
        )


def _written_folders(config: GraphTrainer.Config) -> Iterator[tuple[str, str, bool]]:
    """Yield the folders that a run writes to: flag, value, and whether it does."""
    profiler, metrics = config.profiler, config.metrics
    yield "--profiler.save_traces_folder", profiler.save_traces_folder, profiler.enable_profiling
    yield (
        "--profiler.save_memory_snapshot_folder",
        profiler.save_memory_snapshot_folder,
        profiler.enable_memory_snapshot,
    )
    yield "--metrics.save_tb_folder", metrics.save_tb_folder, metrics.enable_tensorboard
    traces = config.comm.save_traces_folder
    yield "--comm.save_traces_folder", traces, config.comm.trace_buf_size > 0
    yield "--checkpoint.folder", config.checkpoint.folder, config.checkpoint.enable


def _unusable_tokenizer(config: GraphTrainer.Config) -> Iterator[Violation]:
    problem = _tokenizer_problem(config)
    if problem is not None:
        yield Violation(
            flag="--hf_assets_path",
            value=config.hf_assets_path,
            allowed="the folder of the model's tokenizer (tokenizer.json)",
            fix=problem,
        )


def _tokenizer_problem(config: GraphTrainer.Config) -> str | None:
    download = (
        "download the tokenizer from the model's page, and give its folder, or to try things out "
        f"the one that is here, {shipped_tokenizer_path()}"
    )
    if not _is_folder(config.hf_assets_path):
        return download
    try:
        num_tokens = _num_tokens(config)
    except Exception as error:  # noqa: BLE001  # the tokenizers library raises Exception itself
        return f"{error}: {download}"
    vocab_size = getattr(config.model_spec and config.model_spec.model, "vocab_size", None)
    if vocab_size is None or num_tokens <= vocab_size:
        return None
    return (
        f"it has {num_tokens} tokens and the model has {vocab_size} embeddings: give the tokenizer "
        "that the model is meant for, or choose a --config with more"
    )


def _num_tokens(config: GraphTrainer.Config) -> int:
    """Build the tokenizer as the run will, and leave it to the run to say so in the log."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        num_tokens: int = config.tokenizer.build(
            tokenizer_path=config.hf_assets_path
        ).get_vocab_size()
    finally:
        logger.setLevel(level)
    return num_tokens


def _unusable_text(
    section: str,
    dataloader: BaseDataLoader.Config,
    num_readers: int,
    *,
    tokens_of_reader: int,
) -> Iterator[Violation]:
    if isinstance(dataloader, HuggingFaceTextDataLoader.Config):
        yield from _missing_data_set(section, dataloader)
    if not isinstance(dataloader, StdlibTextDataLoader.Config):
        return
    wrong = tuple(dataloader.wrong_options(section))
    yield from wrong
    if wrong:
        return
    try:
        problem = _why_unreadable(
            dataloader.open_text(),
            least_documents=num_readers if dataloader.infinite else 1,
            num_tokens=num_readers * tokens_of_reader,
        )
    except (TextSourceError, OSError) as error:
        problem = str(error)
    if problem is not None:
        yield Violation(
            flag=f"{section}.dataset_path",
            value=dataloader.dataset_path,
            allowed="a folder of text, or None for the standard library's sources",
            fix=problem,
        )


def _missing_data_set(
    section: str, dataloader: HuggingFaceTextDataLoader.Config
) -> Iterator[Violation]:
    """What torchtitan would read, if it is a folder of this machine: OWNER/NAME is on a hub."""
    known = DATASETS.get(dataloader.dataset.lower())
    if known is None:
        yield Violation(
            flag=f"{section}.dataset",
            value=dataloader.dataset,
            allowed=f"a data set of torchtitan's: {', '.join(sorted(DATASETS))}",
            fix="choose one of these, or register yours in torchtitan's DATASETS",
        )
        return
    path = dataloader.dataset_path or known.path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) or Path(path).exists():
        return
    yield Violation(
        flag=f"{section}.dataset",
        value=dataloader.dataset,
        allowed="a data set whose files are here, or on a hub",
        fix=f"there is no {path!r}: give where it is ({section}.dataset_path), or another data set",
    )


def _why_unreadable(text: TextSource, *, least_documents: int, num_tokens: int) -> str | None:
    """Say why ranks would find too little to read. Reads up to the first document that is text."""
    num_documents = len(text.documents)
    if num_documents < least_documents:
        return (
            f"{text.name} has {num_documents} document(s), fewer than the {least_documents} "
            "data-parallel ranks; give more documents, or use fewer ranks"
        )
    if not any(text.read(document) for document in text.documents):
        return f"none of the {num_documents} document(s) of {text.name} has UTF-8 text in it"
    if any(document.block is not None for document in text.documents):
        return None  # of what Parquet has packed, sizes say nothing
    # No token is less than a byte; one more begins a document, and one ends it.
    most_tokens = sum(document.num_bytes + 2 for document in text.documents)
    if most_tokens >= num_tokens:
        return None
    return (
        f"{text.name} has at most {most_tokens:,} tokens, and one step of all ranks takes "
        f"{num_tokens:,}; give more text, or lower --training.seq_len or "
        "--training.local_batch_size"
    )


def _why_unwritable(folder: str) -> str | None:
    """Say why nothing can be written there, None if something can. Changes nothing."""
    if filesystem.is_remote(folder):
        return _why_unreachable(folder)
    path = Path(folder).absolute()
    too_long = [name for name in path.parts if len(os.fsencode(name)) > _LONGEST_NAME]
    if too_long:
        return f"{too_long[0][:40]}... is longer than {_LONGEST_NAME} bytes"
    # The nearest ancestor that exists is where making the folder would begin.
    for existing in (path, *path.parents):
        if not existing.exists():
            continue
        if not existing.is_dir():
            return f"{existing} is a file"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} is not writable"
        return None
    return f"{path.anchor} does not exist"


def _why_unreachable(address: str) -> str | None:
    """Say why a remote file system cannot be used, None if its driver is there."""
    protocol = address.partition("://")[0]
    try:
        importlib.import_module("fsspec").get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        return f"no driver for {protocol}:// ({error})"
    return None


def _is_folder(path: str) -> bool:
    try:
        return bool(path.strip()) and Path(path).is_dir()
    except OSError:  # a name that is too long
        return False
