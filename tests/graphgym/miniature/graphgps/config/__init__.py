from torch_geometric.graphgym.register import register_config
from yacs.config import CfgNode


@register_config("cfg_gt")
def set_cfg_gt(cfg):
    cfg.gt = CfgNode()
    cfg.gt.layer_type = "CustomGatedGCN+Transformer"
    cfg.gt.layers = 3
    cfg.gt.n_heads = 8
    cfg.gt.dim_hidden = 64
    cfg.gt.dropout = 0.0
    cfg.gt.attn_dropout = 0.0
    cfg.gt.layer_norm = False
    cfg.gt.batch_norm = True
