"""What is wrong with a folder of Hugging Face's, told without importing torch or transformers."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = "hf:"
"""Of a ``--module`` that is a folder."""

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
"""Of the length of a safetensors header, little-endian; the header, as JSON, is next."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
"""Of an element, by the names that safetensors gives dtypes."""


class FolderError(ValueError):
    """A file of the folder is not what it should be."""


def folder_of(module: str) -> Path | None:
    """The folder that ``--module`` names; None if it names none."""
    return Path(module.removeprefix(PREFIX)) if module.startswith(PREFIX) else None


def folder_problems(folder: Path) -> Iterator[str]:
    """Everything that can be known to be wrong with a folder before a model is built of it."""
    if importlib.util.find_spec("transformers") is None:
        yield "it needs transformers, which is not there: install gt-trainer[hf]"
    if not folder.is_dir():
        yield "there is no such folder"
        return
    try:
        config = read_config(folder)
    except FolderError as error:
        yield str(error)
    else:
        yield from _config_problems(config)
    if not (folder / TOKENIZER).is_file():
        yield f"it has no {TOKENIZER}"
    try:
        read_weights(folder)
    except FolderError as error:
        yield str(error)


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json.

    Raises:
        FolderError: It is missing, or no JSON object.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FolderError(f"it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise FolderError(f"{CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise FolderError(f"{CONFIG} is a JSON {type(config).__name__}, and must be an object")
    return config


def read_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in the folder's safetensors, by name; no tensor is read.

    Raises:
        FolderError: A file is missing or damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    holders: dict[str, str] = {}
    for path in files:
        try:
            found = _header_shapes(path)
        except OSError as error:
            raise FolderError(f"{path.name} cannot be read: {error!r}") from None
        for name in sorted(found.keys() & holders.keys()):
            raise FolderError(f"{holders[name]} and {path.name} both have {name}")
        holders |= dict.fromkeys(found, path.name)
        shapes |= found
    if (folder / INDEX).is_file():
        _check_index(folder / INDEX, holders, {path.name for path in files})
    return shapes


def _check_index(path: Path, holders: dict[str, str], files: set[str]) -> None:
    try:
        named: dict[str, str] = json.loads(path.read_text())["weight_map"]
        missing = sorted(set(named.values()) - files)
        misplaced = sorted(name for name, file in named.items() if holders.get(name) != file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FolderError(f"{path.name} cannot be read: {error!r}") from None
    if missing:
        raise FolderError(f"{path.name} names {', '.join(missing)}, which is not there")
    if misplaced:
        wrong = f"{misplaced[0]} in {named[misplaced[0]]}"
        raise FolderError(f"{path.name} has {wrong}, and that file has not")


def _header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    damaged = f"{path.name} is damaged: "
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise FolderError(f"{damaged}its header is cut off")
        try:
            header = json.loads(file.read(length))
            tensors = {name: each for name, each in header.items() if name != "__metadata__"}
            shapes = {name: tuple(map(int, each["shape"])) for name, each in tensors.items()}
            end = 0
            for name, each in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
                start, stop = each["data_offsets"]
                num_bits = math.prod(shapes[name]) * _BITS[each["dtype"]]
                if start != end or (stop - start) * 8 != num_bits:
                    raise FolderError(
                        f"{damaged}its header gives {name} memory that is not its own"
                    )
                end = stop
        except FolderError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FolderError(f"{damaged}its header is no description of tensors") from None
    needed = _LENGTH_BYTES + length + end
    if needed != size:
        raise FolderError(f"{damaged}it has {size:,} bytes, and its header says {needed:,}")
    return shapes


def _config_problems(config: dict[str, Any]) -> Iterator[str]:
    if "auto_map" in config:
        yield f"{CONFIG} has an auto_map, which names Python code to be run: it is never run here"
    if "model_type" not in config:
        yield f"{CONFIG} has no model_type"
    if config.get("is_encoder_decoder"):
        yield "its model is an encoder and a decoder, and a step is captured from tokens to logits"
    if config.get("quantization_config"):
        yield "its weights are quantized"
