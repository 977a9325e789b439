"""Read a checkpoint of PyTorch's form as data: nothing that a file names is called.

The metadata of a checkpoint, and what of it is no tensor, are pickles. To unpickle one is to run
what it says, so that whoever can write a folder can run commands where it is loaded, or only looked
at before a start. Here a pickle may name classes of a short list, which hold data.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from gt_trainer.checkpoints.checksums import is_file_name

_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_CLASSES_OF_METADATA = {
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # as Python 3.13 names them
    "torch": {"Size", *_DTYPES},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}


class NotPlainDataError(pickle.UnpicklingError):
    """A file of a checkpoint names what is no data."""


class PlainReader(FileSystemReader):
    """PyTorch's reader of local checkpoints, whose metadata may hold what PyTorch's hold alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what a checkpoint holds.

        Raises:
            NotPlainDataError: The metadata name something else than metadata, or a file that is
                none of the checkpoint's, which no checksum covers.
            Exception: Whatever damaged bytes make a reader of pickles raise.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata: Metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise NotPlainDataError(f"it is a {type(metadata).__name__}, and no metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        for item in (metadata.storage_data or {}).values():
            name = item.relative_path
            if not is_file_name(name) or not name.endswith(DEFAULT_SUFFIX):
                raise NotPlainDataError(f"it names the file {name!r:.200}, which no save writes")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainLoadPlanner(DefaultLoadPlanner):
    """PyTorch's planner of loads, which takes plain values alone where it would take any object."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set what is no tensor.

        Raises:
            pickle.UnpicklingError: It is no plain value; the text says what it names.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES_OF_METADATA.get(module, ()):
            raise NotPlainDataError(f"it names {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


def plain_value_of(pickled: bytes) -> Any:
    """Return what a pickle of numbers, text, lists and dictionaries holds.

    Raises:
        NotPlainDataError: It names a class or a function.
    """
    return _NothingByName(io.BytesIO(pickled)).load()


class _NothingByName(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise NotPlainDataError(f"it names {module}.{name}, which is no plain value")
