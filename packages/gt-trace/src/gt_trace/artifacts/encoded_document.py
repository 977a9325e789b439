"""Captured graphs as JSON with the bytes of constants beside it, and back.

A step, a joint graph, a pipeline stage and a step of several microbatches are the forms of one
document: they differ in their content alone. One encoder, one decoder, and the limits within which
a document is believed, are here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NotRequired, TypedDict, TypeVar, Unpack

from gt_trace._torch_internals import FakeTensorMode
from gt_trace.artifacts.decoder import Decoder
from gt_trace.artifacts.encoder import Encoder
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.operators import NAMESPACES
from gt_trace.errors import ArtifactError
from gt_trace.garbage_collection import held_garbage_collection

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDocument:
    """Captured graphs as JSON, and the bytes of the constant tensors that it names."""

    document: Mapping[str, Any]
    blobs: Mapping[str, bytes]


class DecodingOptions(TypedDict):
    """Arguments that a document needs to become graphs again."""

    blob: Callable[[str], bytes]
    """Gives the bytes of a constant tensor by its name."""

    fake_mode: NotRequired[FakeTensorMode | None]
    """The fake mode, as for ``trace_step``."""

    namespaces: NotRequired[Collection[str]]
    """Namespaces of operators that graphs may call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentForm(Generic[ValueT]):
    """A form of captured graphs, and how they become a document and graphs again."""

    name: str
    """The name that a document has for its form."""

    content: Callable[[Encoder, ValueT], Mapping[str, Any]]
    """Describes captured graphs with an encoder."""

    decoded: Callable[[Decoder, Any], ValueT]
    """Makes the graphs that ``content`` described."""

    def encode(
        self, value: ValueT, axes: MeshAxes, *, namespaces: Collection[str] = NAMESPACES
    ) -> EncodedDocument:
        """Return captured graphs as a document that is the same on all ranks that are alike.

        Args:
            value: Captured graphs, as captured or after passes that generate no code.
            axes: Names of this rank's process groups.
            namespaces: Namespaces of operators that graphs may call.

        Raises:
            ArtifactError: The value holds something that no document can hold; it is named.
        """
        encoder = Encoder(axes, namespaces=namespaces)
        document = encoder.document({"form": self.name, **self.content(encoder, value)})
        return EncodedDocument(document=document, blobs=encoder.blobs)

    def decode(self, document: Any, axes: MeshAxes, **options: Unpack[DecodingOptions]) -> ValueT:
        """Return the graphs of a document, as this rank would have captured them.

        Args:
            document: The document that ``encode`` made, through JSON.
            axes: Names of this rank's process groups, and its place.
            **options: ``DecodingOptions``; graphs that overlap need one ``fake_mode``.

        Raises:
            ArtifactError: The document is damaged or of another form, or names what this process
                does not have.
        """
        with _whatever_is_wrong_is_damage(), held_garbage_collection():
            decoder = Decoder(
                document,
                axes,
                blob=options["blob"],
                fake_mode=options.get("fake_mode"),
                namespaces=options.get("namespaces", NAMESPACES),
            )
            if (form := decoder.content["form"]) != self.name:
                raise ArtifactError(f"the document is of a {form!r}, and not of a {self.name!r}")
            return self.decoded(decoder, decoder.content)


@contextmanager
def _whatever_is_wrong_is_damage() -> Iterator[None]:
    try:
        yield
    except ArtifactError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {str(error)[:500]}"
        raise ArtifactError(f"the document is not one that was written here ({what})") from error
    except Exception as error:  # whatever PyTorch raises of what it cannot make
        first_line = str(error).partition("\n")[0]
        raise ArtifactError(
            f"the document describes what there cannot be ({first_line[:500]})"
        ) from error
