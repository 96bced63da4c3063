import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_chimera.ops.structure.grid import grid_edges
from pyg_chimera.transforms._inputs import Transform


class ToGrid(Transform):
    """Converts an attribute of the data, or its content alone, to a grid graph."""

    attr_name: str
    content: str  #: what the attribute holds, for messages, such as "an image"
    coordinates: int  #: the number of coordinates of a position

    def nodes(self, content: Any) -> tuple[Tensor, int, int]:
        """Features of nodes, row by row, and the numbers of rows and columns."""
        raise NotImplementedError

    def __call__(self, data: Any) -> Data:
        """Converts a copy of the data, or the content alone."""
        # Content is not copied: a copy of a PIL image would be a deep one.
        return self.forward(copy.copy(data) if isinstance(data, Data) else data)

    def forward(self, data: Any) -> Data:
        """Converts the data, in place, or the content alone."""
        if isinstance(data, (Batch, HeteroData)):
            raise TypeError(
                "The transform takes a homogeneous 'torch_geometric.data.Data' or "
                f"{self.content}, one by one, got '{type(data).__name__}'"
            )
        if isinstance(data, Data):
            if self.attr_name not in data:
                raise ValueError(
                    f"The transform needs 'data.{self.attr_name}', {self.content}, got "
                    f"data with {data.keys()}"
                )
            x, height, width = self.nodes(data[self.attr_name])
            for key in (self.attr_name, "edge_attr", "num_nodes"):
                if key in data:
                    del data[key]
        else:
            x, height, width = self.nodes(data)
            data = Data()

        edge_index, pos = grid_edges(height, width)
        data.x = x
        data.edge_index = edge_index.to(x.device)
        data.pos = pos[:, : self.coordinates].to(x.device, torch.float)
        data.height = height
        data.width = width
        return data
