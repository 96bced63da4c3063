"""Tiny inputs of operators, on which backends are compared and compiled."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: Arguments of a public function.
Example = dict[str, Any]


class Draw:
    """Draws numbers that bfloat16 can represent, the same ones each time."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normally distributed numbers."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return rounded(scale * x)

    def nodes(self, size: int) -> Example:
        """Queries and keys that two heads share, and values."""
        shapes = {"query": (1, 6), "key": (1, 6), "value": (2, 5)}
        return {name: self(size, *shape) for name, shape in shapes.items()}

    def graph(self, kind: str) -> Example:
        """A graph that takes several tiles of a kernel, and one of three nodes."""
        size = 70 if "path" in kind else 40
        node = torch.arange(1, size)
        edges = torch.stack([node - 1, node])
        if kind in ("dag", "graph"):
            others = torch.stack([(5 * node + 3) % node, node])
            edges = torch.cat([edges[:, ::3], others, others[:, :1]], 1)  # a duplicate
        edges = torch.cat([edges, torch.tensor([[size], [size + 1]])], 1)
        if kind in ("graph", "undirected path"):
            edges = torch.cat([edges, edges.flip(0), torch.full((2, 1), 7)], 1)
        order = torch.randperm(size + 3, generator=self.generator)
        return {"edge_index": order.argsort()[edges], "batch": (order >= size).long()}

    def weights(self, graph: Example, channels: int) -> Tensor:
        """Weights with which the rows of |A| sum to less than one."""
        target = graph["edge_index"][1]
        degree = torch.bincount(target)[target].unsqueeze(1)
        return rounded(0.9 * self(len(target), channels).tanh() / degree)


def rounded(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.bfloat16().double()


def mixes(draw: Draw, *kinds: str) -> Iterator[Example]:
    """Yield queries, keys, values and edge weights on graphs of some kinds."""
    for kind in kinds:
        graph = draw.graph(kind)
        nodes = draw.nodes(len(graph["batch"]))
        yield {**nodes, **graph, "edge_weight": draw.weights(graph, 2)}


def sequences(draw: Draw, **shapes: tuple[int, ...]) -> Iterator[Example]:
    """Yield tensors of given shapes over three packed sequences, one of them empty."""
    inputs = {name: draw(*shape) for name, shape in shapes.items()}
    yield {**inputs, "ptr": torch.tensor([0, 70, 70, 75])}
