import torch
import torch.nn.functional as F
from torch_geometric.utils import scatter


class GatedGCNLayer(torch.nn.Module):
    """From batch to batch, with the residual connections of nodes and edges inside."""

    def __init__(self, dim_h, dropout):
        super().__init__()
        self.A, self.B, self.C, self.D, self.E = (
            torch.nn.Linear(dim_h, dim_h) for _ in range(5)
        )
        self.bn_node_x = torch.nn.BatchNorm1d(dim_h)
        self.bn_edge_e = torch.nn.BatchNorm1d(dim_h)
        self.dropout = dropout

    def forward(self, batch):
        x, e, (source, target) = batch.x, batch.edge_attr, batch.edge_index
        gate = self.D(x)[target] + self.E(x)[source] + self.C(e)
        sums = [
            scatter(part, target, 0, x.size(0), "sum")
            for part in (gate.sigmoid() * self.B(x)[source], gate.sigmoid())
        ]
        out = self.A(x) + sums[0] / (sums[1] + 1e-6)
        out, gate = F.relu(self.bn_node_x(out)), F.relu(self.bn_edge_e(gate))
        batch.x = x + F.dropout(out, self.dropout, self.training)
        batch.edge_attr = e + F.dropout(gate, self.dropout, self.training)
        return batch
