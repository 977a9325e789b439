"""Which model a folder of checkpoints belongs to, kept beside them as a file that people can read.

A checkpoint holds tensors by name. Another model's fails to load, deep inside torch and on every
rank; or, where the models differ in a number that no shape tells, such as the base of the rotary
embedding, it loads without a word. So what decides a model's function is written to ``model.json``
when training starts, and compared before a run resumes.

Checkpoints without that file (torchtitan's own, say) are compared by the names and shapes of their
tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchtitan.protocols.model_spec import ModelSpec

from gt_trace.artifacts.regular_file import read_regular
from gt_trace.artifacts.strict_json import parse_json

MODEL_FILE = "model.json"
"""Name of the file in the checkpoint folder."""

_NO_PART_OF_THE_MODEL = frozenset(
    {
        "inner_attention",  # the device's choice
        "token_dispatcher",  # how ranks exchange tokens
        "sharding_config",
        "param_init",
        "max_seq_len",  # torchtitan sets it to the run's sequence length
    }
)
_NO_TENSORS_OF_THE_MODEL = ("train_state.", "optimizer.", "lr_scheduler.", "dataloader.")
_MAX_TOLD = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What tells one model from another."""

    name: str
    """Family and flavor, such as "llama3 debugmodel"; for people, and not compared."""

    fields: Mapping[str, str]
    """Text of each value of the model's configuration, by path. The layers of a list are one entry:
    ``layers.*.attention.n_heads`` is "16", or "0: 16; 1-5: 8" where they differ."""


def identity_of(spec: ModelSpec) -> ModelIdentity:
    """Return the identity of a model that is to be trained, before or after it was built."""
    kind = type(spec.model).__qualname__.removesuffix(".Config")
    fields = {"class": kind, **dict(_fields(spec.model, ""))}
    return ModelIdentity(name=f"{spec.name} {spec.flavor}", fields=fields)


def write_identity(folder: Path, identity: ModelIdentity) -> None:
    """Write the file into a folder of checkpoints, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"model": identity.name, "fields": identity.fields}
    temporary = folder / f".{MODEL_FILE}.tmp"
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(folder / MODEL_FILE)


def read_identity(folder: Path) -> ModelIdentity | None:
    """Return the identity of the model whose checkpoints a folder holds; None if it does not say.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / MODEL_FILE
    if not path.is_file():
        return None
    try:
        document = parse_json(read_regular(path))
        return ModelIdentity(name=document["model"], fields=dict(document["fields"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{MODEL_FILE} cannot be read ({type(error).__name__}): delete that file, and the "
            "model is told by the names and shapes of its tensors"
        ) from error


def explain_difference(stored: ModelIdentity, current: ModelIdentity) -> str | None:
    """Name the fields that differ, the most general first; None if none does."""
    paths = sorted(
        (
            path
            for path in dict.fromkeys([*stored.fields, *current.fields])
            if stored.fields.get(path) != current.fields.get(path)
        ),
        key=lambda path: path.count("."),
    )
    return _listed(
        f"{path} {stored.fields.get(path, 'none')} (here {current.fields.get(path, 'none')})"
        for path in paths
    )


def explain_tensors(stored: Metadata, spec: ModelSpec) -> str | None:
    """Name the model's tensors that a checkpoint lacks or has otherwise, and layers beyond its own.

    What else a checkpoint has beyond the model, such as a buffer of old, is loaded by nobody.

    Args:
        stored: The checkpoint's metadata.
        spec: The model to load it into. It is built without memory.
    """
    with torch.device("meta"):
        tensors = spec.model.build().state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found = {
        name: tuple(entry.size)
        for name, entry in stored.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and not name.startswith(_NO_TENSORS_OF_THE_MODEL)
        and (name in wanted or re.search(r"\.\d+\.", name))
    }
    return _listed(
        f"{name} {found.get(name, 'none')} (here {wanted.get(name, 'none')})"
        for name in dict.fromkeys([*wanted, *found])
        if wanted.get(name) != found.get(name)
    )


def _fields(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of every plain value in a configuration."""
    prefix = f"{path}." if path else ""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in _NO_PART_OF_THE_MODEL:
                yield from _fields(getattr(value, field.name), f"{prefix}{field.name}")
    elif isinstance(value, (list, tuple)):
        yield path, str(len(value))
        items = [dict(_fields(item, "")) for item in value]
        for name in dict.fromkeys(name for item in items for name in item):
            text = _text_of([item.get(name, "none") for item in items])
            yield f"{prefix}*.{name}".removesuffix("."), text
    elif isinstance(value, (str, int, float)):
        yield path, str(value)


def _text_of(values: list[str]) -> str:
    """Return the value of all items of a list, or those of each run of equal items."""
    if len(set(values)) == 1:
        return values[0]
    texts: list[str] = []
    for value, run in itertools.groupby(enumerate(values), key=lambda item: item[1]):
        indices = [index for index, _ in run]
        span = f"{indices[0]}-{indices[-1]}" if len(indices) > 1 else f"{indices[0]}"
        texts.append(f"{span}: {value}")
    return "; ".join(texts)


def _listed(differences: Iterator[str]) -> str | None:
    told = list(itertools.islice(differences, _MAX_TOLD))
    num_more = sum(1 for _ in differences)
    if num_more:
        told.append(f"{num_more} more")
    return ", ".join(told) or None
