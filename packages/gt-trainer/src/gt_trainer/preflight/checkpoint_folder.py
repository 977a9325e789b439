"""Judge the checkpoints that a run would resume from, before it starts.

torchtitan resumes from the newest step folder that holds a ``.metadata`` file, and passes over all
others without a word (``torchtitan/components/checkpointer/dcp.py``, ``_find_load_step``). A folder
without that file is a save that was cut off. Resuming from an older complete one, or from the
beginning if there is none, is right, and worth a warning: nothing that was saved is lost. A
complete checkpoint whose files are missing or short would fail on some rank, deep in the load; it
is refused here, and so is one that holds another model, or weights alone where a run would resume
from it. Whether each byte is what was saved is seen by the ranks, which share the reading.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import filesystem

from gt_config import Violation
from gt_trainer.checkpoints.checksums import ChecksumsUnreadableError, read_checksums
from gt_trainer.checkpoints.plain_reader import NotPlainDataError, PlainReader
from gt_trainer.model_identity import (
    explain_difference,
    explain_tensors,
    identity_of,
    read_identity,
)
from gt_trainer.step_folders import (
    METADATA,
    has_metadata,
    is_complete,
    misnamed_step_folders,
    step_folders,
    step_of,
)

_READER = "dataloader.dp_rank_"
_STATES_OF_A_RUN = ("train_state", "optimizer")


def can_be_resumed(path: Path, checkpoint: BaseCheckpointManager.Config) -> bool:
    """Whether a complete checkpoint is intact and has the state that the run would load."""
    try:
        metadata = _intact_metadata(path)
    except _UnusableError:
        return False
    return metadata is not None and _has_state(metadata, checkpoint)


def flags_to_start_from(path: Path) -> str:
    """Return the flags with which another run starts from the weights of a checkpoint."""
    in_hf = "" if has_metadata(path) else " --checkpoint.initial_load_in_hf"
    return f"--checkpoint.initial_load_path {path.absolute()}{in_hf}"


def check_checkpoints(
    checkpoint: BaseCheckpointManager.Config,
    dump_folder: Path,
    *,
    spec: ModelSpec | None,
    num_steps: int,
    num_readers: int,
) -> Iterator[Violation]:
    """Yield what is wrong with the checkpoint that the run would load; remote ones are not read.

    Args:
        checkpoint: The ``--checkpoint.`` flags.
        dump_folder: The run's folder, in which the checkpoint folder is.
        spec: The model to train.
        num_steps: The last step of the run. A checkpoint of it leaves nothing to resume.
        num_readers: Data-parallel ranks, each of which reads its own part of the data.
    """
    if filesystem.is_remote(str(dump_folder)) or filesystem.is_remote(checkpoint.folder):
        return
    folder = dump_folder / checkpoint.folder
    if folder.exists() and not folder.is_dir():
        yield Violation(
            flag="--checkpoint.folder",
            value=str(folder),
            allowed="a folder, or a path where nothing is yet",
            fix="move the file away, or choose another --checkpoint.folder",
        )
        return
    if misnamed := misnamed_step_folders(folder):
        yield Violation(
            flag="--checkpoint.folder",
            value=str(folder),
            allowed="folders step-N of checkpoints, with N in ASCII digits and no zeros in front",
            fix=f"rename or move away {', '.join(repr(path.name) for path in misnamed)}",
        )
        return
    steps = step_folders(folder)
    complete = [path for path in steps if is_complete(path)]
    incomplete = ", ".join(path.name for path in steps if not is_complete(path))
    if checkpoint.load_step != -1:
        chosen = folder / f"step-{checkpoint.load_step}"
        if chosen not in complete:
            known = ", ".join(str(step_of(path)) for path in complete)
            yield Violation(
                flag="--checkpoint.load_step",
                value=checkpoint.load_step,
                allowed=f"a step saved in {folder}: {known or 'there is none'}",
                fix="choose one of these, or leave the flag out for the newest",
            )
            return
    elif complete:
        chosen = complete[-1]
        if incomplete:
            warnings.warn(
                f"{incomplete} in {folder} cut off while being saved (no {METADATA}); "
                f"resuming from {chosen.name}",
                stacklevel=2,
            )
    else:
        if steps:
            warnings.warn(
                f"{incomplete} in {folder} cut off while being saved (no {METADATA}), and there is "
                "no other: training starts from its beginning",
                stacklevel=2,
            )
        yield from _check_initial(checkpoint, spec)
        return
    has_steps_left = checkpoint.load_step != -1 or step_of(chosen) < num_steps
    yield from _check_resumed(
        chosen,
        checkpoint,
        spec=spec,
        num_readers=num_readers if has_steps_left and step_of(chosen) > 0 else None,
    )


def _check_initial(
    checkpoint: BaseCheckpointManager.Config, spec: ModelSpec | None
) -> Iterator[Violation]:
    """Judge what a run without checkpoints of its own starts from."""
    initial = checkpoint.initial_load_path
    if initial is None or filesystem.is_remote(initial):
        return
    path = Path(initial)
    if not path.is_dir():
        yield Violation(
            flag="--checkpoint.initial_load_path",
            value=initial,
            allowed="the folder of a checkpoint",
            fix="give an existing folder",
        )
        return
    if checkpoint.initial_load_in_hf or spec is None:
        return
    try:
        metadata = _intact_metadata(path)
        if metadata is None:
            raise _UnusableError(f"no {METADATA} in it; give a folder step-N of a full checkpoint")
        differences = explain_tensors(metadata, spec)
    except _UnusableError as error:
        problem = str(error)
    else:
        if differences is None:
            return
        problem = f"it has {differences}; give a checkpoint of this model"
    yield Violation(
        flag="--checkpoint.initial_load_path",
        value=initial,
        allowed=f"an intact checkpoint of {spec.name} {spec.flavor}",
        fix=f"{problem}, or --checkpoint.initial_load_in_hf for one in Hugging Face's form",
    )


def _check_resumed(
    path: Path,
    checkpoint: BaseCheckpointManager.Config,
    *,
    spec: ModelSpec | None,
    num_readers: int | None,
) -> Iterator[Violation]:
    """Yield at most one violation: why a folder that looks complete cannot be resumed from.

    Without readers, weights are enough: there is nothing to do, or step 0 is loaded.
    """
    another = "choose another --dump_folder"
    damage: str | None = None
    try:
        checksums = read_checksums(path)
        if checksums is not None and (problem := checksums.step_problem(path)) is not None:
            raise _UnusableError(f"{problem}; rename it to step-{checksums.step}, or else")
        metadata = _intact_metadata(path)
        stored = read_identity(path.parent)
    except (_UnusableError, ChecksumsUnreadableError) as error:
        damage = f"{error}: delete this folder to resume from an older one"
    except ValueError as error:
        damage = str(error)
    if damage is not None:
        yield Violation(
            flag="--checkpoint.folder",
            value=str(path),
            allowed="an intact checkpoint",
            fix=f"{damage}, or {another}",
        )
        return
    if spec is not None:
        name, differences = "another model", None
        if stored is not None:
            name, differences = stored.name, explain_difference(stored, identity_of(spec))
        elif metadata is not None:
            differences = explain_tensors(metadata, spec)
        if differences is not None:
            yield Violation(
                flag="--checkpoint.folder",
                value=str(path),
                allowed=f"a checkpoint of {spec.name} {spec.flavor}",
                fix=f"it is of {name}, with {differences}: {another}, or train that model",
            )
            return
    if num_readers is None:
        return
    if metadata is None or not _has_state(metadata, checkpoint):
        saved = "in_hf" if metadata is None else "model_only"
        yield Violation(
            flag="--checkpoint.folder",
            value=str(path),
            allowed="a checkpoint with the optimizer's state, to resume from",
            fix=(
                f"it has weights alone, by --checkpoint.last_save_{saved}: to start from them, "
                f"{another} and give {flags_to_start_from(path)}; to resume from an older step, "
                "give --checkpoint.load_step"
            ),
        )
        return
    saved_readers = sum(name.startswith(_READER) for name in metadata.state_dict_metadata)
    if (
        saved_readers not in (0, num_readers)
        and "dataloader" not in checkpoint.exclude_from_loading
    ):
        yield Violation(
            flag="--checkpoint.folder",
            value=str(path),
            allowed=f"a checkpoint of {num_readers} data-parallel rank(s), to read on from there",
            fix=(
                f"{saved_readers} read when it was saved: use as many, or begin the text anew with "
                "--checkpoint.exclude_from_loading dataloader"
            ),
        )


class _UnusableError(ValueError):
    """Why a checkpoint cannot be loaded, in words."""


def _intact_metadata(path: Path) -> Metadata | None:
    """Read what a checkpoint holds, and see that it is there; None in Hugging Face's form.

    Raises:
        _UnusableError: Something is damaged.
    """
    if not has_metadata(path):
        return None
    try:
        metadata = PlainReader(path).read_metadata()
    except NotPlainDataError as error:
        raise _UnusableError(f"{METADATA} is none: {error}") from error
    except Exception as error:  # unpickling damaged bytes can raise anything
        raise _UnusableError(f"{METADATA} cannot be read ({type(error).__name__})") from error
    needed: dict[str, int] = {}
    for item in (metadata.storage_data or {}).values():
        end = item.offset + item.length
        needed[item.relative_path] = max(end, needed.get(item.relative_path, 0))
    for name, size_bytes in sorted(needed.items()):
        if not (path / name).is_file():
            raise _UnusableError(f"{name} is missing")
        found = (path / name).stat().st_size
        if found < size_bytes:
            raise _UnusableError(f"{name} has {found} bytes of at least {size_bytes}")
    return metadata


def _has_state(metadata: Metadata, checkpoint: BaseCheckpointManager.Config) -> bool:
    """Whether a checkpoint has more than weights, as far as the run would load it."""
    wanted = [state for state in _STATES_OF_A_RUN if state not in checkpoint.exclude_from_loading]
    return all(
        any(name.startswith(f"{state}.") for name in metadata.state_dict_metadata)
        for state in wanted
    )
