"""A generated dataset of graphs and one of nodes, registered with GraphGym."""

import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.loader import set_dataset_attr
from torch_geometric.graphgym.register import register_edge_encoder, register_loader
from torch_geometric.utils import to_undirected

EDGE_DIM = 3


def graph(num_nodes: int, generator: torch.Generator) -> Data:
    """A random tree and a few edges more, labelled by whether there are many."""
    parents = torch.arange(1, num_nodes)
    tree = torch.stack([(parents * torch.rand(num_nodes - 1)).long(), parents])
    more = torch.randint(num_nodes, (2, num_nodes // 3), generator=generator)
    edge_index = to_undirected(torch.cat([tree, more], dim=1), num_nodes=num_nodes)
    return Data(
        x=torch.randn(num_nodes, 5, generator=generator),
        edge_index=edge_index,
        edge_attr=torch.randn(edge_index.size(1), EDGE_DIM, generator=generator),
        y=torch.tensor([num_nodes % 3]),
    )


class Generated(InMemoryDataset):
    def __init__(self, graphs: list[Data]) -> None:
        super().__init__(None)
        self.data, self.slices = self.collate(graphs)


def load_generated(format: str, name: str, dataset_dir: str) -> Generated | None:
    if format != "generated":
        return None
    generator = torch.Generator().manual_seed(0)
    if name == "graphs":
        dataset = Generated([graph(6 + i % 7, generator) for i in range(24)])
        parts = torch.arange(24).split([16, 4, 4])
        for split, index in zip(("train", "val", "test"), parts, strict=True):
            set_dataset_attr(dataset, f"{split}_graph_index", index, len(index))
        return dataset
    data = graph(30, generator)
    data.y = torch.arange(30) % 3
    for i, split in enumerate(("train", "val", "test")):
        data[f"{split}_mask"] = torch.arange(30) % 5 % 3 == i
    return Generated([data])


class EdgeEncoder(torch.nn.Module):
    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        # GraphGPS calls it with the width that it has put here, GraphGym with its own.
        assert emb_dim == cfg.gnn.get("dim_edge", cfg.gnn.dim_inner)
        self.lin = torch.nn.Linear(EDGE_DIM, emb_dim)

    def forward(self, batch: Data) -> Data:
        batch.edge_attr = self.lin(batch.edge_attr)
        return batch


register_loader("generated", load_generated)
register_edge_encoder("generated_edges", EdgeEncoder)
