"""What `pyg_chimera.graphgym.gps_model` relies on in GraphGPS: names, and where layers
call their feed-forward block.
"""

from torch_geometric.graphgym.register import register_config
from yacs.config import CfgNode

from graphgps.network import gps_model  # noqa: F401


@register_config("cfg_gt")
def set_cfg_gt(cfg):
    cfg.gt = CfgNode()
    cfg.gt.layer_type, cfg.gt.layers = "CustomGatedGCN+Transformer", 3
    cfg.gt.n_heads, cfg.gt.dim_hidden = 8, 64
    cfg.gt.dropout, cfg.gt.attn_dropout = 0.0, 0.0
    cfg.gt.layer_norm, cfg.gt.batch_norm = False, True
