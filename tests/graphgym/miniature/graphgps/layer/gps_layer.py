import torch
from torch_geometric.data import Batch
from torch_geometric.graphgym.register import act_dict
from torch_geometric.nn import GINEConv, LayerNorm
from torch_geometric.utils import to_dense_batch

from graphgps.layer.gatedgcn_layer import GatedGCNLayer


class GPSLayer(torch.nn.Module):
    """The parts have GraphGPS's names. Models are chosen in chains of `if`, twice."""

    def __init__(
        self, dim_h, local_gnn_type, global_model_type, num_heads, act="relu",
        dropout=0.0, attn_dropout=0.0, layer_norm=False, batch_norm=True,
    ):  # fmt: skip
        super().__init__()
        self.dim_h, self.num_heads = dim_h, num_heads
        self.layer_norm, self.batch_norm = layer_norm, batch_norm
        self.local_gnn_type = local_gnn_type
        self.global_model_type = global_model_type

        if local_gnn_type == "None":
            self.local_model = None
        elif local_gnn_type == "GINE":
            self.local_model = GINEConv(torch.nn.Linear(dim_h, dim_h))
        elif local_gnn_type == "CustomGatedGCN":
            self.local_model = GatedGCNLayer(dim_h, dropout)
        else:
            raise ValueError(f"no local model called {local_gnn_type}")

        if global_model_type == "None":
            self.self_attn = None
        elif global_model_type == "Transformer":
            self.self_attn = torch.nn.MultiheadAttention(
                dim_h, num_heads, dropout=attn_dropout, batch_first=True
            )
        else:
            raise ValueError(f"no global model called {global_model_type}")

        if layer_norm and batch_norm:
            raise ValueError("one norm is enough")
        make = LayerNorm if layer_norm else torch.nn.BatchNorm1d
        if layer_norm or batch_norm:
            self.norm1_local, self.norm1_attn = make(dim_h), make(dim_h)
            self.norm2 = make(dim_h)
        self.dropout_local = torch.nn.Dropout(dropout)
        self.dropout_attn = torch.nn.Dropout(dropout)
        self.ff_linear1 = torch.nn.Linear(dim_h, dim_h * 2)
        self.ff_linear2 = torch.nn.Linear(dim_h * 2, dim_h)
        self.act_fn_ff = act_dict[act]()
        self.ff_dropout1 = torch.nn.Dropout(dropout)
        self.ff_dropout2 = torch.nn.Dropout(dropout)

    def forward(self, batch):
        x, branches = batch.x, []
        if self.local_gnn_type == "CustomGatedGCN":
            # A batch of its own; what comes back has the updated edges.
            own = Batch(x=x, edge_index=batch.edge_index, edge_attr=batch.edge_attr)
            own = self.local_model(own)
            batch.edge_attr = own.edge_attr
            branches.append(self._normed("norm1_local", own.x, batch))
        elif self.local_model is not None:
            out = self.local_model(x, batch.edge_index, batch.edge_attr)
            out = x + self.dropout_local(out)
            branches.append(self._normed("norm1_local", out, batch))

        if self.self_attn is not None:
            if self.global_model_type != "Transformer":
                raise RuntimeError(f"unexpected {self.global_model_type}")
            dense, mask = to_dense_batch(x, batch.batch)
            out, _ = self.self_attn(dense, dense, dense, key_padding_mask=~mask)
            out = x + self.dropout_attn(out[mask])
            branches.append(self._normed("norm1_attn", out, batch))

        h = sum(branches)
        batch.x = self._normed("norm2", h + self._ff_block(h), batch)
        return batch

    def _normed(self, name, x, batch):
        if self.layer_norm:
            return getattr(self, name)(x, batch.batch)
        return getattr(self, name)(x) if self.batch_norm else x

    def _ff_block(self, x):
        x = self.ff_dropout1(self.act_fn_ff(self.ff_linear1(x)))
        return self.ff_dropout2(self.ff_linear2(x))
