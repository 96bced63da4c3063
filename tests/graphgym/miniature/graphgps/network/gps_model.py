import torch
from graphgps.layer.gps_layer import GPSLayer
from torch_geometric.graphgym import register
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.models.gnn import GNNPreMP


@register.register_network("GPSModel")
class GPSModel(torch.nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        width = cfg.gnn.dim_edge = cfg.gnn.dim_inner
        if cfg.gt.dim_hidden != width:
            raise ValueError("the dims must match")
        make = register.edge_encoder_dict[cfg.dataset.edge_encoder_name]
        self.encoder = make(width)
        self.pre_mp = GNNPreMP(dim_in, width, cfg.gnn.layers_pre_mp)
        local_gnn_type, global_model_type = cfg.gt.layer_type.split("+")
        self.layers = torch.nn.Sequential(
            *(
                GPSLayer(
                    width,
                    local_gnn_type,
                    global_model_type,
                    cfg.gt.n_heads,
                    dropout=cfg.gt.dropout,
                    layer_norm=cfg.gt.layer_norm,
                    batch_norm=cfg.gt.batch_norm,
                )
                for _ in range(cfg.gt.layers)
            )
        )
        head = register.head_dict[cfg.gnn.head]
        self.post_mp = head(dim_in=width, dim_out=dim_out)

    def forward(self, batch):
        for module in self.children():
            batch = module(batch)
        return batch
