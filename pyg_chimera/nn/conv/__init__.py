from pyg_chimera.nn.conv.chimera_conv import ChimeraConv
from pyg_chimera.nn.conv.gated_gcn_conv import GatedGCNConv
from pyg_chimera.nn.conv.graph_mamba_conv import GraphMambaConv
from pyg_chimera.nn.conv.plstm_conv import PLSTMConv

__all__ = ["ChimeraConv", "GatedGCNConv", "GraphMambaConv", "PLSTMConv"]
