from pyg_chimera.nn.conv.chimera_conv import ChimeraConv
from pyg_chimera.nn.conv.chimera_dag_conv import ChimeraDAGConv
from pyg_chimera.nn.conv.chimera_grid_conv import ChimeraGridConv
from pyg_chimera.nn.conv.chimera_path_conv import ChimeraPathConv
from pyg_chimera.nn.conv.gated_delta_conv import GatedDeltaConv
from pyg_chimera.nn.conv.gated_gcn_conv import GatedGCNConv
from pyg_chimera.nn.conv.graph_mamba_conv import GraphMambaConv
from pyg_chimera.nn.conv.k_hop_attention_conv import KHopAttentionConv
from pyg_chimera.nn.conv.plstm_conv import PLSTMConv
from pyg_chimera.nn.conv.plstm_grid_conv import PLSTMGridConv
from pyg_chimera.nn.conv.rg_lru_conv import RGLRUConv

__all__ = [
    "ChimeraConv",
    "ChimeraDAGConv",
    "ChimeraGridConv",
    "ChimeraPathConv",
    "GatedDeltaConv",
    "GatedGCNConv",
    "GraphMambaConv",
    "KHopAttentionConv",
    "PLSTMConv",
    "PLSTMGridConv",
    "RGLRUConv",
]
