import torch
from torch.nn import BatchNorm1d, Dropout, Linear
from torch_geometric.nn import GINEConv, LayerNorm


class UpdatesEdges(torch.nn.Module):
    def __init__(self, dim_h):
        super().__init__()
        self.nodes, self.edges = Linear(dim_h, dim_h), Linear(dim_h, dim_h)

    def forward(self, batch):
        batch.x = batch.x + self.nodes(batch.x)
        batch.edge_attr = self.edges(batch.edge_attr)
        return batch


class GPSLayer(torch.nn.Module):
    """Of local models, one that updates edges, one that does not, and none; of global
    models none, as ours are put in its place.
    """

    def __init__(
        self, dim_h, local_gnn_type, global_model_type, num_heads, act="relu",
        dropout=0.0, attn_dropout=0.0, layer_norm=False, batch_norm=True,
    ):  # fmt: skip
        super().__init__()
        if global_model_type != "None":
            raise ValueError(f"no global model called {global_model_type}")
        self.dim_h, self.num_heads = dim_h, num_heads
        self.layer_norm, self.batch_norm = layer_norm, batch_norm
        self.local_model = None
        if local_gnn_type != "None":
            updates = local_gnn_type == "CustomGatedGCN"
            conv = UpdatesEdges(dim_h) if updates else GINEConv(Linear(dim_h, dim_h))
            self.local_model = conv
        make = LayerNorm if layer_norm else BatchNorm1d
        if layer_norm or batch_norm:
            self.norm1_local, self.norm1_attn = make(dim_h), make(dim_h)
            self.norm2 = make(dim_h)
        self.dropout_attn = Dropout(dropout)
        self.ff_linear1, self.ff_linear2 = Linear(dim_h, dim_h), Linear(dim_h, dim_h)

    def forward(self, batch):
        h = torch.zeros_like(batch.x)
        if isinstance(self.local_model, UpdatesEdges):
            out = self.local_model(batch.clone())
            h = self._normed("norm1_local", out.x, batch)
            batch.edge_attr = out.edge_attr
        elif self.local_model is not None:
            out = self.local_model(batch.x, batch.edge_index, batch.edge_attr)
            h = self._normed("norm1_local", batch.x + out, batch)
        batch.x = self._normed("norm2", h + self._ff_block(h), batch)
        return batch

    def _normed(self, name, x, batch):
        if self.layer_norm:
            return getattr(self, name)(x, batch.batch)
        return getattr(self, name)(x) if self.batch_norm else x

    def _ff_block(self, x):
        return self.ff_linear2(torch.relu(self.ff_linear1(x)))
