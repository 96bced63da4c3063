from typing import Any

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import eigsh
from torch_geometric.data import Batch, Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.utils import (
    coalesce,
    get_laplacian,
    is_undirected,
    remove_self_loops,
    to_scipy_sparse_matrix,
    to_undirected,
)

from pyg_chimera.ops.common.checks import check_integer, check_option
from pyg_chimera.transforms._inputs import Transform, check_attr_name, graph_of

__all__ = ["LaplacianEncoding"]

_DENSE_NODES = 500  # up to here, finding all eigenvectors is faster than a few


@functional_transform("chimera_laplacian_encoding")
class LaplacianEncoding(Transform):
    r"""Adds eigenvectors and eigenvalues of the graph's Laplacian, as the `"Recipe for
    a General, Powerful, Scalable Graph Transformer"
    <https://arxiv.org/abs/2205.12454>`_ uses them to encode the positions of nodes
    (functional name: :obj:`chimera_laplacian_encoding`).

    .. math::
        \mathbf{I} - \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2} =
        \mathbf{\Phi} \, \mathrm{diag}(\lambda) \, \mathbf{\Phi}^{\top}

    Adds :obj:`data.laplacian_pe`, floating point :math:`[|\mathcal{V}|, k, 2]`: the
    node's entry of each of the :math:`k` eigenvectors with the smallest eigenvalues,
    and the eigenvalue, in ascending order. Unlike with
    :class:`torch_geometric.transforms.AddLaplacianEigenvectorPE`, the trivial
    eigenvector is among them. Eigenvectors have norm 1; their signs are arbitrary.
    :class:`~pyg_chimera.nn.LaplacianEncoder` takes this as input.

    Every graph has an encoding. If the graph has fewer than :math:`k` nodes, it is
    padded with zeros. In a graph of several components, each eigenvector is zero
    outside one of them. A node without neighbours is a component with the eigenvalue 1,
    by the formula above (0 without normalization). Self-loops, duplicates and edge
    weights are ignored.

    Takes :math:`O(|\mathcal{V}|^3)` time in components of up to 500 nodes. Larger ones
    take a sparse factorization, if :math:`k` is small. The same graph always has the
    same encoding, on the same machine.

    Args:
        k (int): The number of eigenvectors.
        attr_name (str, optional): The attribute for the encoding.
            (default: :obj:`"laplacian_pe"`)
        is_undirected (bool, optional): If set to :obj:`True`, each edge must be present
            in both directions. Otherwise directions are ignored. (default: :obj:`True`)
        normalization (str, optional): :obj:`"sym"` for the Laplacian above, or
            :obj:`None` for :math:`\mathbf{D} - \mathbf{A}`. (default: :obj:`"sym"`)

    Raises:
        ValueError: If an argument is not as above, an edge lacks its reverse, the
            data is a batch, or has no valid :obj:`edge_index`.
        TypeError: If the data is not homogeneous, or :obj:`k` or :obj:`edge_index` is
            not integer.
    """

    def __init__(
        self,
        k: int,
        attr_name: str = "laplacian_pe",
        is_undirected: bool = True,
        normalization: str | None = "sym",
    ) -> None:
        k = check_integer("k", k, 1)
        check_option("normalization", normalization, ("sym", None))
        check_attr_name("attr_name", attr_name)
        self.k = k
        self.attr_name = attr_name
        self.is_undirected = is_undirected
        self.normalization = normalization

    def forward(self, data: Data) -> Data:
        """Adds the attribute to a copy of the data."""
        if isinstance(data, Batch):
            raise ValueError(
                "The transform takes one graph, got a batch; apply it to the graphs "
                "before they are batched"
            )
        edge_index, num_nodes = graph_of(data)
        edges = coalesce(remove_self_loops(edge_index)[0].cpu(), num_nodes=num_nodes)
        if self.is_undirected and not is_undirected(edges, num_nodes=num_nodes):
            raise ValueError(
                "'data.edge_index' must hold the reverse of each edge; apply "
                "'torch_geometric.transforms.ToUndirected' first, or set "
                "'is_undirected=False'"
            )
        edges = to_undirected(edges, num_nodes=num_nodes)
        ones = edges.new_ones(edges.size(1), dtype=torch.double)
        graph = get_laplacian(edges, ones, self.normalization, num_nodes=num_nodes)
        laplacian = to_scipy_sparse_matrix(*graph, num_nodes=num_nodes).tocsr()

        pairs = []  # (eigenvalue, nodes, entries), the smallest ones of each component
        number, component = connected_components(laplacian, directed=False)
        order = np.argsort(component, kind="stable")
        ends = np.bincount(component, minlength=number).cumsum()
        for nodes in np.split(order, ends[:-1]) if number else []:
            values, vectors = self._decompose(laplacian[nodes][:, nodes])
            values[values < 1e-12] = 0.0
            pairs += [(x, nodes, v) for x, v in zip(values, vectors.T, strict=True)]
        pairs.sort(key=lambda pair: pair[0])

        out = np.zeros((num_nodes, self.k, 2))
        for i, (value, nodes, vector) in enumerate(pairs[: self.k]):
            out[nodes, i, 0] = vector
            out[:, i, 1] = value
        data[self.attr_name] = torch.from_numpy(out).to(
            edge_index.device, torch.get_default_dtype()
        )
        return data

    def _decompose(self, laplacian: Any) -> tuple[np.ndarray, np.ndarray]:
        """The smallest eigenvalues of a component, ascending, with eigenvectors."""
        n = laplacian.shape[0]
        if n <= _DENSE_NODES or 4 * self.k > n:
            values, vectors = np.linalg.eigh(laplacian.toarray())
            return values[: self.k], vectors[:, : self.k]
        # Any start will do, but without one, it is random and results would vary.
        start = np.random.default_rng(0).random(n)
        values, vectors = eigsh(laplacian.tocsc(), self.k, sigma=-0.01, v0=start)
        order = np.argsort(values)
        return values[order], vectors[:, order]
