from yacs.config import CfgNode

__all__ = ["chimera_cfg"]


def chimera_cfg(cfg: CfgNode) -> None:
    r"""Adds the group :obj:`chimera` to a configuration of GraphGym.

    It holds the options that GraphGym lacks. Width, depth, activation, dropout and
    batch norm are those of its group :obj:`gnn`, or :obj:`gt` in a layer of GraphGPS.

    Args:
        cfg (yacs.config.CfgNode): The configuration to add the group to.
    """
    cfg.chimera = CfgNode()

    # Number of heads (all but GraphMamba); null: 'gt.n_heads' in a layer of GraphGPS,
    # otherwise 'gnn.att_heads'.
    cfg.chimera.heads = None

    # Size of a head's keys, or of a channel's state in GraphMamba (all but
    # KHopAttention); null: the layer's default.
    cfg.chimera.state_channels = None

    # Width of the edge features that the mixer reads (all but GraphMamba); null: that
    # of the edge encoder, if there is one; 0: the mixer reads none; a number: that of
    # the raw features.
    cfg.chimera.edge_dim = None

    # PLSTM: 'P', 'D', or in the networks any string of both, such as 'PD' for layers
    # of both modes in turn.
    cfg.chimera.mode = "P"

    # The order of nodes (GraphMamba), or that by which edges are directed (PLSTM), by
    # name; 'auto': 'degree' (GraphMamba) or 'bfs' (PLSTM); null: the data have a
    # 'node_score' (GraphMamba) or are DAGs (PLSTM). GraphMamba uses a 'node_score' of
    # the data, if present, in place of any order.
    cfg.chimera.order = "auto"

    # GraphMamba: number of parts into which the nodes of each graph are divided.
    cfg.chimera.num_bins = 1

    # GraphMamba: number of permutations in evaluation.
    cfg.chimera.num_eval_permutations = 5

    # The networks: local layer, 'gated_gcn', 'gin', 'gcn' or 'none'.
    cfg.chimera.conv = "gated_gcn"

    # The networks: 'parallel' or 'sequential', see `pyg_chimera.nn.GPSLayer`.
    cfg.chimera.arrangement = "sequential"

    # HybridGPS: recurrences (r) and attention (a), repeated over the depth.
    cfg.chimera.pattern = "rrra"

    # Further arguments of the mixer, by name.
    cfg.chimera.kwargs = CfgNode(new_allowed=True)
