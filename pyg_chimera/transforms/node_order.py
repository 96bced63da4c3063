from collections.abc import Callable

from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.ops.structure.centrality import ORDERS, node_score
from pyg_chimera.transforms._inputs import (
    Transform,
    check_attr_name,
    graph_of,
    mark,
    score_of,
)

__all__ = ["NodeOrder"]


@functional_transform("chimera_node_order")
class NodeOrder(Transform):
    r"""Stores the score of each node, to sort nodes into a sequence, as in
    `"Graph-Mamba: Towards Long-Range Graph Sequence Modeling with Selective State
    Spaces" <https://arxiv.org/abs/2402.00789>`_ (functional name:
    :obj:`chimera_node_order`).

    With :obj:`score=data.node_score`, :class:`~pyg_chimera.nn.GraphMambaConv` need not
    compute it in each forward pass. Adds :obj:`data.node_score`, int64 or floating
    point :math:`[|\mathcal{V}|]`. The least important nodes have the lowest score; the
    layer breaks ties at random. Adds :obj:`data.node_score_checksum` as well, int64
    :math:`[|\mathcal{V}|]`, by which :class:`~pyg_chimera.nn.GraphModel` and
    :func:`~pyg_chimera.ops.structure.check_stored` refuse scores of other edges.

    Args:
        order (str or Callable, optional): The score, one of :obj:`"order"`,
            :obj:`"degree"`, :obj:`"eigenvector"`, :obj:`"pagerank"`,
            :obj:`"closeness"`, :obj:`"bfs"`, :obj:`"random"` and :obj:`"cluster"`, see
            :func:`~pyg_chimera.ops.node_score`, or a function of the data
            that returns one score per node, of shape :math:`[|\mathcal{V}|]`.
            (default: :obj:`"degree"`)
        attr_name (str, optional): The attribute for the score.
            (default: :obj:`"node_score"`)

    Raises:
        ValueError: If :obj:`order` is unknown, its scores have the wrong shape or
            contain NaN, the attribute's name would make PyG batch it wrongly, or the
            data has no valid :obj:`edge_index`.
        TypeError: If the data is not homogeneous, :obj:`edge_index` is not integer, or
            scores are not real.
    """

    def __init__(
        self,
        order: str | Callable[[Data], Tensor] = "degree",
        attr_name: str = "node_score",
    ) -> None:
        if not callable(order) and order not in ORDERS:
            raise ValueError(
                f"'order' must be a function or one of {list(ORDERS)}, got {order!r}"
            )
        check_attr_name("attr_name", attr_name)
        self.order = order
        self.attr_name = attr_name

    def forward(self, data: Data) -> Data:
        """Adds the attribute to a copy of the data."""
        edge_index, num_nodes = graph_of(data)
        if callable(self.order):
            score = score_of(self.order, data, num_nodes)
        else:
            score = node_score(edge_index, num_nodes, self.order, data.batch)
        data[self.attr_name] = score
        mark(data, self.attr_name)
        return data
