"""Small models of every shape that splitting must understand."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gt_pipeline.split import LayerNaming

DECODER_NAMING = LayerNaming(first=("embed",), layers="layers", last=("norm", "head"))


class Decoder(nn.Module):
    """Embedding, blocks and head; its forward skips what is None."""

    def __init__(
        self, num_layers: int = 4, *, width: int = 8, vocabulary: int = 16, dict_like: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        blocks = [Block(width) for _ in range(num_layers)]
        self.layers: nn.Module = (
            nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
            if dict_like
            else nn.ModuleList(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = tokens if self.embed is None else self.embed(tokens)
        layers = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for layer in layers:
            hidden = layer(hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return hidden if self.head is None else self.head(hidden)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * torch.tanh(self.linear(hidden))


class Nested(nn.Module):
    """Containers in containers, a parameter of its own, and a child without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.arange(8.0))
        self.register_buffer("seen", torch.zeros(()))
        self.towers = nn.ModuleDict(
            {
                "left": nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]),
                "right": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
            }
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.position is not None:
            x = x + self.position
        self.seen += 1
        for layer in self.towers["left"]:
            x = layer(x)
        if "right" in self.towers:
            x = self.towers["right"](x)
        return self.dropout(x)


class LayerShelf(nn.Module):
    """Behaves as a list of modules and is none of PyTorch's."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(f"layer{index}", layer)

    def __len__(self) -> int:
        return len(list(self.children()))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index]


class Shelved(nn.Module):
    def __init__(self, shelf: nn.Module) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.shelf:
            x = layer(x)
        return x
