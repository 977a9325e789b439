"""What tells alike pipeline stages apart: their index, and the numbers of their layers.

Layers keep the numbers that they have in the whole model, so that graphs of alike stages differ in
names. A stored stage has the places of its layers in the stage instead, and is the same for all
that are alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gt_trace.errors import ArtifactError

_NUMBERED = re.compile(r"(?<![A-Za-z0-9])(layers[._])(\d+)(?![A-Za-z0-9])")
_PLACED = re.compile(r"(?<![A-Za-z0-9])(layers[._])#(\d+)(?![A-Za-z0-9])")
_OF_A_MODULE = re.compile(r"(layers\.)(\d+)(?=\.|$)")
_INDEX = re.compile(r'(\["stage_index",|"stage_index":)\d+')


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNames:
    """A stage of a pipeline, and which layers of the model it holds."""

    stage_index: int
    num_stages: int
    layers: tuple[int, ...]
    """Numbers of the layers in the model, in ascending order."""

    @classmethod
    def of(cls, part: Any, *, stage_index: int, num_stages: int) -> StageNames:
        """The names of a stage.

        Args:
            part: holds the modules of the stage; a decoder's layers are in ``layers``.
            stage_index: from 0.
            num_stages: of the pipeline.
        """
        layers = getattr(part, "layers", nn.ModuleDict())
        numbers = sorted(int(name) for name, _ in layers.named_children())
        return cls(stage_index=stage_index, num_stages=num_stages, layers=tuple(numbers))

    def names_a_layer(self, data: object) -> bool:
        """Whether plain data names a layer by its number: what does so holds for one stage."""
        return _NUMBERED.search(json.dumps(data, default=repr)) is not None

    def of_module(self, name: str) -> str:
        """The name of a module, parameter or buffer of the stage, by the places of layers."""
        return _OF_A_MODULE.sub(lambda found: found[1] + self._place(found[2]), name, count=1)

    def text_without(self, text: str) -> str:
        """A text in which every layer of the stage is called by its place, as ``layers.#0``.

        Raises:
            ArtifactError: something in it is called so already.
        """
        if _PLACED.search(text) is not None:
            raise ArtifactError("names like 'layers.#0' are kept for layers of stored stages")

        def placed(found: re.Match[str]) -> str:
            own = int(found[2]) in self.layers
            return found[1] + (f"#{self._place(found[2])}" if own else found[2])

        return _NUMBERED.sub(placed, text)

    def without(self, document: Mapping[str, Any]) -> Any:
        """A document of a stage as all alike ones have it.

        Raises:
            ArtifactError: as ``text_without``.
        """
        text = self.text_without(json.dumps(document, separators=(",", ":")))
        return json.loads(_INDEX.sub(r"\g<1>0", text))

    def restored(self, document: Any) -> Any:
        """The document of this stage, of what ``without`` made of that of an alike one.

        Raises:
            ArtifactError: it is of a stage with more layers.
        """

        def numbered(found: re.Match[str]) -> str:
            place = int(found[2])
            if place >= len(self.layers):
                raise ArtifactError(
                    f"a stored stage has a layer {place} of its own, and this one "
                    f"{len(self.layers)} layers"
                )
            return f"{found[1]}{self.layers[place]}"

        text = _PLACED.sub(numbered, json.dumps(document, separators=(",", ":")))
        return json.loads(_INDEX.sub(rf"\g<1>{self.stage_index}", text))

    def _place(self, number: str) -> str:
        return str(self.layers.index(int(number)))
