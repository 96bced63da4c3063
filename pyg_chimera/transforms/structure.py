import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.ops.common.checks import check_integer, check_option
from pyg_chimera.ops.structure import (
    diameter,
    elimination_rank,
    k_hop_index,
    topological_rank,
)
from pyg_chimera.ops.structure.elimination import METHODS
from pyg_chimera.transforms._inputs import Transform, check_attr_name, graph_of, mark

__all__ = ["AddDiameter", "AddEliminationOrder", "AddKHopIndex", "AddTopologicalOrder"]


@functional_transform("chimera_add_elimination_order")
class AddEliminationOrder(Transform):
    r"""Stores a fill-reducing elimination order of the graph (functional name:
    :obj:`chimera_add_elimination_order`).

    With :obj:`rank=data.elimination_rank`,
    :class:`~pyg_chimera.nn.ChimeraConv` and
    :func:`~pyg_chimera.ops.resolvent_mix` need not search for one. Adds
    :obj:`data.elimination_rank`, int64 :math:`[|\mathcal{V}|]`: how many nodes are
    eliminated before each node.

    Args:
        attr_name (str, optional): The attribute for the rank.
            (default: :obj:`"elimination_rank"`)
        method (str, optional): How to find the order, :obj:`"minimum_fill"` or
            :obj:`"metis"`, see :func:`~pyg_chimera.ops.structure.elimination_rank`.
            (default: :obj:`"minimum_fill"`)

    Raises:
        ValueError: If the attribute's name would make PyG batch it wrongly,
            :obj:`method` is unknown, or the data has no valid :obj:`edge_index`.
        ImportError: If :obj:`method="metis"` and :obj:`pymetis` is missing.
    """

    def __init__(
        self, attr_name: str = "elimination_rank", method: str = "minimum_fill"
    ) -> None:
        check_attr_name("attr_name", attr_name)
        check_option("method", method, METHODS)
        self.attr_name = attr_name
        self.method = method

    def forward(self, data: Data) -> Data:
        """Adds the attribute to a copy of the data."""
        data[self.attr_name] = elimination_rank(*graph_of(data), self.method)
        return data


@functional_transform("chimera_add_k_hop_index")
class AddKHopIndex(Transform):
    r"""Stores the pairs of nodes at most :math:`k` steps apart, as
    :func:`~pyg_chimera.ops.k_hop_index` finds them (functional name:
    :obj:`chimera_add_k_hop_index`).

    With :obj:`k_hop_index=data.k_hop_index, k_hop_distance=data.k_hop_distance`,
    :class:`~pyg_chimera.nn.KHopAttentionConv` need not search for them. Adds
    :obj:`data.k_hop_index`, int64 :math:`[2, |\mathcal{P}|]`, including each node with
    itself, and :obj:`data.k_hop_distance`, int64 :math:`[|\mathcal{P}|]`. The layer
    refuses pairs of other edges: apply this transform after those that change edges or
    renumber nodes.

    Args:
        k (int): The largest number of steps.
        prefix (str, optional): The prefix of the names of the attributes. (default:
            :obj:`"k_hop"`)

    Raises:
        ValueError: If :obj:`k` is less than 1, the prefix would make PyG batch the
            distances wrongly, or the data has no valid :obj:`edge_index`.
        TypeError: If :obj:`k` is not an integer.
    """

    def __init__(self, k: int, prefix: str = "k_hop") -> None:
        k = check_integer("k", k, 1)
        check_attr_name("prefix", prefix)
        self.k = k
        self.prefix = prefix

    def forward(self, data: Data) -> Data:
        """Adds the attributes to a copy of the data."""
        pairs = k_hop_index(*graph_of(data), self.k)
        data[f"{self.prefix}_index"], data[f"{self.prefix}_distance"] = pairs
        return data


@functional_transform("chimera_add_topological_order")
class AddTopologicalOrder(Transform):
    r"""Stores the topological rank of each node of a directed acyclic graph
    (functional name: :obj:`chimera_add_topological_order`).

    With :obj:`rank=data.topological_rank`, :class:`~pyg_chimera.nn.ChimeraDAGConv`
    and :func:`~pyg_chimera.ops.dag_scan` need not compute it. Adds
    :obj:`data.topological_rank`, int64 :math:`[|\mathcal{V}|]`: the length of the
    longest path that ends in each node.

    Args:
        attr_name (str, optional): The attribute for the rank.
            (default: :obj:`"topological_rank"`)

    Raises:
        CycleError: If the graph has a cycle.
        ValueError: If the attribute's name would make PyG batch it wrongly, or the
            data has no valid :obj:`edge_index`.
    """

    def __init__(self, attr_name: str = "topological_rank") -> None:
        check_attr_name("attr_name", attr_name)
        self.attr_name = attr_name

    def forward(self, data: Data) -> Data:
        """Adds the attribute to a copy of the data."""
        data[self.attr_name] = topological_rank(*graph_of(data))
        return data


@functional_transform("chimera_add_diameter")
class AddDiameter(Transform):
    r"""Stores the diameter of the graph, the largest finite hop distance
    (functional name: :obj:`chimera_add_diameter`).

    With powers up to the diameter, the finite sum :math:`\sum_i A^i` spans the whole
    graph: pass it to :class:`~pyg_chimera.nn.ChimeraConv` with :obj:`solver="neumann"`
    as :obj:`num_terms=data.diameter`. Adds :obj:`data.diameter`, int64 :math:`[1]`,
    which batches to one entry per graph, and :obj:`data.diameter_checksum`, int64
    :math:`[|\mathcal{V}|]`, by which :class:`~pyg_chimera.nn.GraphModel` and
    :func:`~pyg_chimera.ops.structure.check_stored` refuse diameters of other edges.

    Args:
        attr_name (str, optional): The attribute for the diameter.
            (default: :obj:`"diameter"`)

    Raises:
        ValueError: If the attribute's name would make PyG batch it wrongly, or the
            data has no valid :obj:`edge_index`.
    """

    def __init__(self, attr_name: str = "diameter") -> None:
        check_attr_name("attr_name", attr_name)
        self.attr_name = attr_name

    def forward(self, data: Data) -> Data:
        """Adds the attribute to a copy of the data."""
        edge_index, num_nodes = graph_of(data)
        found = diameter(edge_index, num_nodes, data.batch)
        found = torch.as_tensor(found, device=edge_index.device).view(-1)
        if isinstance(data, Batch):  # whose last graphs may be empty
            found = F.pad(found, (0, max(0, data.num_graphs - len(found))))
        data[self.attr_name] = found
        mark(data, self.attr_name)
        return data
