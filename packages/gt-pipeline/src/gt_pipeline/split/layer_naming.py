"""What a family of models calls its parts, as data.

Splitting by layers needs four names and no code: what stands before the layers, the layers, what
stands after them, and what every stage needs (a rotary embedding, which has no parameters).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from gt_pipeline.errors import StageNamesError
from gt_pipeline.split.named_parts import name_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNaming:
    """Qualified names of a model's parts, in the order in which its forward runs them.

    Attributes:
        first: what stands before the layers.
        layers: the container of the layers, a ``ModuleList``, ``ModuleDict`` or the like.
        last: what stands after the layers.
        every_stage: what each stage needs. It may have parameters only in a shared group.
    """

    first: tuple[str, ...] = ()
    layers: str
    last: tuple[str, ...] = ()
    every_stage: tuple[str, ...] = ()

    def layer_names(self, num_layers: int) -> tuple[str, ...]:
        """Names of layers that are numbered from 0."""
        return tuple(f"{self.layers}.{index}" for index in range(num_layers))

    def layer_names_of(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the layers that ``model`` has.

        Raises:
            StageNamesError: it has nothing of that name.
        """
        problems = name_problems(model, [self.layers])
        if problems:
            raise StageNamesError(what="layers of the model", problems=problems)
        children = model.get_submodule(self.layers).named_children()
        return tuple(f"{self.layers}.{name}" for name, _ in children)

    def names_of(self, model: nn.Module) -> tuple[str, ...]:
        """Names of all parts that go to one stage each, in order.

        Raises:
            StageNamesError: the model lacks one. All are listed.
        """
        problems = name_problems(model, [*self.first, self.layers, *self.last, *self.every_stage])
        if problems:
            raise StageNamesError(what="parts of the model", problems=problems)
        return (*self.first, *self.layer_names_of(model), *self.last)


TORCHTITAN_NAMING = LayerNaming(
    first=("tok_embeddings",), layers="layers", last=("norm", "lm_head")
)
HUGGING_FACE_NAMING = LayerNaming(
    first=("model.embed_tokens",),
    layers="model.layers",
    last=("model.norm", "lm_head"),
    every_stage=("model.rotary_emb",),
)
KNOWN_NAMINGS: Mapping[str, LayerNaming] = MappingProxyType(
    {"torchtitan": TORCHTITAN_NAMING, "Hugging Face": HUGGING_FACE_NAMING}
)


def find_naming(
    model: nn.Module, *, known: Mapping[str, LayerNaming] = KNOWN_NAMINGS
) -> LayerNaming:
    """The one of ``known`` whose names the model has.

    Raises:
        StageNamesError: none fits, or several do. The message says what each one misses.
    """
    fitting = []
    problems = []
    for title, naming in known.items():
        wanted = [*naming.first, naming.layers, *naming.last, *naming.every_stage]
        missing = name_problems(model, wanted)
        problems += [f"{title}: {problem}" for problem in missing]
        if not missing:
            fitting.append(title)
    if len(fitting) == 1:
        return known[fitting[0]]
    if fitting:
        problems = [f"{', '.join(fitting)} all fit: choose one"]
    raise StageNamesError(what=f"naming of {type(model).__name__}", problems=problems)
