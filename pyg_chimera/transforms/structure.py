import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from pyg_chimera.ops.structure import (
    diameter,
    elimination_rank,
    fill_in,
    topological_rank,
)

__all__ = ["AddDiameter", "AddEliminationOrder", "AddTopologicalOrder"]


@functional_transform("chimera_add_elimination_order")
class AddEliminationOrder(BaseTransform):
    r"""Stores a fill-reducing elimination order of the graph, and its fill-in
    (functional name: :obj:`chimera_add_elimination_order`).

    With :obj:`rank=data.elimination_rank`,
    :class:`~pyg_chimera.nn.ChimeraConv` and
    :func:`~pyg_chimera.ops.resolvent_mix` need not search for one. Adds

    * :obj:`data.elimination_rank`, int64 :math:`[|\mathcal{V}|]`: how many nodes are
      eliminated before each node,
    * :obj:`data.fill_index`, int64 :math:`[2, |\mathcal{F}|]`: the undirected edges of
      the filled graph, from the node eliminated first to the other.

    Args:
        attr_name (str, optional): The attribute for the rank.
            (default: :obj:`"elimination_rank"`)
        index_name (str, optional): The attribute for the fill-in; it must contain
            :obj:`"index"`, by which PyG knows that it holds nodes.
            (default: :obj:`"fill_index"`)

    Raises:
        ValueError: If an attribute's name would make PyG batch it wrongly, or the
            data has no valid :obj:`edge_index`.
    """

    def __init__(
        self,
        attr_name: str = "elimination_rank",
        index_name: str = "fill_index",
    ) -> None:
        check_attr_name("attr_name", attr_name)
        if "index" not in index_name or "batch" in index_name:
            raise ValueError(
                "'index_name' must contain 'index' and not 'batch', as PyG tells by "
                f"the name how to batch an attribute (got '{index_name}')"
            )
        self.attr_name = attr_name
        self.index_name = index_name

    def forward(self, data: Data) -> Data:
        """Adds the attributes to a copy of the data."""
        edge_index, num_nodes = edges_of(data)
        rank = elimination_rank(edge_index, num_nodes)
        data[self.attr_name] = rank
        data[self.index_name] = fill_in(edge_index, num_nodes, rank)
        return data


@functional_transform("chimera_add_topological_order")
class AddTopologicalOrder(BaseTransform):
    r"""Stores the topological rank of each node of a directed acyclic graph
    (functional name: :obj:`chimera_add_topological_order`).

    With :obj:`rank=data.topological_rank`, :class:`~pyg_chimera.nn.ChimeraConv`
    with :obj:`topology="dag"` and :func:`~pyg_chimera.ops.dag_scan` need not compute
    it. Adds :obj:`data.topological_rank`, int64 :math:`[|\mathcal{V}|]`: the length of
    the longest path that ends in each node.

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
        data[self.attr_name] = topological_rank(*edges_of(data))
        return data


@functional_transform("chimera_add_diameter")
class AddDiameter(BaseTransform):
    r"""Stores the diameter of the graph, the largest finite hop distance
    (functional name: :obj:`chimera_add_diameter`).

    So many terms make the finite sum :math:`\sum_i A^i` span the whole graph:
    :class:`~pyg_chimera.nn.ChimeraConv` with :obj:`solver="neumann"` takes it as
    :obj:`num_terms=data.diameter`. Adds :obj:`data.diameter`, int64 :math:`[1]`, which
    batches to one entry per graph.

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
        edge_index, num_nodes = edges_of(data)
        data[self.attr_name] = torch.tensor(
            [diameter(edge_index, num_nodes)], device=edge_index.device
        )
        return data


def edges_of(data: Data) -> tuple[Tensor, int]:
    """The edges and the number of nodes of homogeneous data that has edges."""
    if not isinstance(data, Data):
        raise TypeError(
            "The transform takes a homogeneous 'torch_geometric.data.Data' (got "
            f"'{type(data).__name__}')"
        )
    if data.edge_index is None:
        raise ValueError(
            "The transform needs 'data.edge_index' of shape [2, num_edges] (got data "
            f"with {data.keys()})"
        )
    num_nodes = data.num_nodes
    assert num_nodes is not None  # PyG takes it from 'edge_index' at the latest.
    return data.edge_index, num_nodes


def check_attr_name(argument: str, name: str) -> None:
    """Refuse names by which PyG would take a value for node or graph indices."""
    if "index" in name or "batch" in name or name == "face":
        raise ValueError(
            f"'{argument}' must not contain 'index' or 'batch' or be 'face', as PyG "
            f"tells by the name how to batch an attribute (got '{name}')"
        )
