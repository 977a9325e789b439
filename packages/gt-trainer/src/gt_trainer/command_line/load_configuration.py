"""The configuration that ``--module`` and ``--config`` name, before any flag changes it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gt_trainer.command_line.command_line import CommandLine, UsageError
from gt_trainer.command_line.near_matches import did_you_mean
from gt_trainer.late_imports import compiling_nothing, imported_when_used
from gt_trainer.models.catalog import CATALOG
from gt_trainer.models.hugging_face.folder import folder_of
from gt_trainer.models.torchtitan_modules import is_own_module, python_module

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

    from gt_trainer.trainer import GraphTrainer


def load_configuration(command: CommandLine) -> GraphTrainer.Config:
    """Import the module and call the function; this is where the heavy imports happen."""
    from gt_trainer.device import DeviceUnavailableError, install, intended_device_type

    try:
        installed = install()
    except DeviceUnavailableError as error:
        raise UsageError(str(error)) from None
    if installed == "cpu":
        # PyTorch asks for GPUs at each fake operator, and looks for the driver each time.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    # On a CPU models attend otherwise, and nothing calls the functions that torchtitan compiles.
    attends_otherwise = intended_device_type() == "cpu"
    with (
        imported_when_used("datasets"),
        imported_when_used("networkx"),
        compiling_nothing() if attends_otherwise else contextlib.nullcontext(),
    ):
        from torchtitan.tools.logging import init_logger
        from torchtitan.trainer import Trainer

        from gt_trainer.trainer import GraphTrainer

    init_logger()
    folder = folder_of(command.module)
    if folder is not None:
        return _with_own_folder(_of_hugging_face(folder), command.config)
    name = python_module(command.module)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if command.module in CATALOG or error.name is None:
            raise
        missing = f"there is no Python module {error.name!r}"
        needs = f"it needs the Python module {error.name!r}, which is not there"
        its_own = name == error.name or name.startswith(f"{error.name}.")
        raise UsageError(f"--module {name}: {missing if its_own else needs}") from None
    except Exception as error:
        if not is_own_module(command.module):
            raise
        raise UsageError(f"--module {name} cannot be imported: {_told(error)}") from None
    function: Any = getattr(module, command.config, None)
    if not _takes_nothing(function):
        functions = [
            key
            for key, value in vars(module).items()
            if _takes_nothing(value) and not key.startswith("_")
        ]
        if function is not None:
            raise UsageError(
                f"{name}.{command.config} is no function in Python that takes no arguments and "
                f"returns a configuration.{did_you_mean(command.config, functions)}"
            )
        raise UsageError(
            f"module {name!r} has no function {command.config!r}."
            f"{did_you_mean(command.config, functions)}"
        )
    try:
        config = function()
    except Exception as error:
        if not is_own_module(command.module):
            raise
        raise UsageError(f"{name}.{command.config}() failed: {_told(error)}") from None
    if isinstance(config, Trainer.Config) and not isinstance(config, GraphTrainer.Config):
        config = _adapted(config, name, command.config)
    if not isinstance(config, GraphTrainer.Config):
        raise UsageError(
            f"{name}.{command.config} returned {config!r}, which is no configuration of a trainer"
        )
    from gt_trainer.models.adapt import adapt_published, is_as_published

    if is_as_published(config):
        config = adapt_published(config)
    # What was assigned to it since it was made may be torchtitan's own: it is given our options.
    config = dataclasses.replace(config)
    if command.published is not None:
        if command.published.positions is not None:
            from gt_trainer.models.adapt import with_positions

            config = with_positions(config, command.published.positions)
        return _with_own_folder(config, command.published.name)
    own = is_own_module(command.module)
    return _with_own_folder(config, f"{name}.{command.config}" if own else command.config)


def _takes_nothing(function: Any) -> bool:
    """Whether it is a function in Python that may be called without arguments."""
    if isinstance(function, type) or not callable(function) or inspect.isbuiltin(function):
        return False
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _told(error: Exception) -> str:
    """Return an error with the line of the user's module that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _of_hugging_face(folder: Path) -> GraphTrainer.Config:
    from gt_trainer.models.hugging_face.configuration import (
        UntrainableFolderError,
        hugging_face_configuration,
    )

    try:
        return hugging_face_configuration(folder)
    except UntrainableFolderError as error:
        raise UsageError(f"--module hf:{folder} cannot be trained here: {error}") from None


def _adapted(config: Trainer.Config, module: str, function: str) -> GraphTrainer.Config:
    """What somebody published for torchtitan's own trainer."""
    from gt_trainer.models.any_decoder import UnadaptableError, adapt_any, is_debug_configuration

    try:
        return adapt_any(config, is_debug=is_debug_configuration(module, function))
    except UnadaptableError as error:
        raise UsageError(f"{module}.{function} cannot be trained here: {error}") from None


def _with_own_folder(config: GraphTrainer.Config, name: str) -> GraphTrainer.Config:
    """Let a configuration that leaves torchtitan's dump folder as it is write into one of its own.

    Else each would find the checkpoints of the one before it.
    """
    default = next(f.default for f in dataclasses.fields(config) if f.name == "dump_folder")
    if config.dump_folder != default:
        return config
    return dataclasses.replace(config, dump_folder=str(Path(config.dump_folder, name)))
