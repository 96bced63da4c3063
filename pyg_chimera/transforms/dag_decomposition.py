import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.checks import check_integer
from pyg_chimera.ops.structure import connected_components, node_score, topological_rank
from pyg_chimera.ops.structure.csr import inverse, simple, to_numpy
from pyg_chimera.ops.structure.distance import search_tree
from pyg_chimera.ops.structure.grid import grid_dag, is_grid
from pyg_chimera.transforms._inputs import (
    Transform,
    check_attr_name,
    graph_of,
    mark,
    score_of,
)

__all__ = ["DAGDecomposition"]

_SCORES = ("degree", "pagerank", "closeness")
_SEARCHES = ("bfs", "bfs_dense")
_ORDERS = ("order", *_SCORES, "random", *_SEARCHES)
#: The methods that give a fixed number of known DAGs.
_KNOWN = {"path": 2, "grid": 4, "dag": 2}


@functional_transform("chimera_dag_decomposition")
class DAGDecomposition(Transform):
    r"""Decomposes an undirected graph into directed acyclic graphs over its nodes,
    as in `"Chimera: State Space Models Beyond Sequences"
    <https://arxiv.org/abs/2510.12111>`_ (functional name:
    :obj:`chimera_dag_decomposition`).

    DAGs come in pairs: entry :math:`2k + 1` is entry :math:`2k` with each edge reversed
    (with an odd :obj:`num_dags`, the last one has no partner). Except with searches,
    edges lead from earlier to later nodes of an order, so that each DAG has every
    undirected edge and each pair every directed one. Adds

    * :obj:`data.dag_edge_index`, a list of :obj:`num_dags` int64 tensors
      :math:`[2, |\mathcal{E}_d|]`: the edges of :obj:`data.edge_index` that each DAG
      keeps, in their order there,
    * :obj:`data.dag_edge_attr`, the list of their rows of :obj:`data.edge_attr`, if
      there is one,
    * :obj:`data.dag_rank`, a list of int64 tensors :math:`[|\mathcal{V}|]`: the
      topological rank of each node in each DAG, see
      :func:`~pyg_chimera.ops.structure.topological_rank`,
    * :obj:`data.dag_checksum`, int64 :math:`[|\mathcal{V}|]`, by which
      :class:`~pyg_chimera.nn.GraphModel` and
      :func:`~pyg_chimera.ops.structure.check_stored` refuse DAGs of other edges.

    PyG's loaders batch these lists entry by entry. Apply this transform last: those
    that select or sort nodes or edges, or convert the graph, do not update the lists,
    and fail if they take one for an attribute of nodes or edges, because it has as many
    entries. The DAGs would still have edges that
    :class:`torch_geometric.transforms.RandomLinkSplit` holds out.

    Except with :obj:`method="dag"`, the graph must contain each edge in both directions
    (as after :class:`torch_geometric.transforms.ToUndirected`), and each direction has
    its own features. Self-loops are in no DAG. Duplicates stay together, except that a
    tree keeps one of them. Components, including isolated nodes, are decomposed
    independently.

    Args:
        num_dags (int, optional): The number of DAGs. (default: :obj:`4` for a grid,
            otherwise :obj:`2`)
        method (str or Callable, optional): How to choose them.

            * :obj:`"path"`: forwards and backwards along a path, whose nodes are in
              order.
            * :obj:`"grid"`: the four canonical DAGs of a grid of :obj:`data.height`
              rows and :obj:`data.width` columns, with nodes row by row: right and down,
              left and up, right and up, left and down.
            * :obj:`"dag"`: the graph itself, which must be acyclic, and its reverse,
              whose edges have the same features.
            * :obj:`"order"`: by the order of the nodes.
            * :obj:`"degree"`, :obj:`"pagerank"`, :obj:`"closeness"`: by a
              :func:`~pyg_chimera.ops.node_score`, highest last, then by number.
            * a function of the data that returns one score per node, of shape
              :math:`[|\mathcal{V}|]`: by that score, highest last, then by number.
            * :obj:`"random"`: by a random order for each pair.
            * :obj:`"bfs"`: the tree of a breadth-first search from a random root in
              each component, a different one for each pair as far as possible.
            * :obj:`"bfs_dense"`: all edges that lead one level away from such a root.

            (default: :obj:`"order"`)
        seed (int, optional): Makes the random choices a function of the graph, the same
            in every process and epoch. Without it, they are drawn anew each time, from
            PyTorch's global generator. (default: :obj:`None`)
        prefix (str, optional): The prefix of the names of the attributes.
            (default: :obj:`"dag"`)

    Raises:
        TypeError: If the data is not homogeneous, or an index is not integer.
        ValueError: If an argument is not as above, the method does not have
            :obj:`num_dags` different DAGs, an edge lacks its reverse, or a shape or an
            index is wrong.
        CycleError: With :obj:`method="dag"`, if the graph has a cycle.
    """

    def __init__(
        self,
        num_dags: int | None = None,
        method: str | Callable[[Data], Tensor] = "order",
        *,
        seed: int | None = None,
        prefix: str = "dag",
    ) -> None:
        if not callable(method) and method not in (*_ORDERS, *_KNOWN):
            raise ValueError(
                "'method' must be a function or one of "
                f"{[*_KNOWN, *_ORDERS]}, got {method!r}"
            )
        known = 0 if callable(method) else _KNOWN.get(method, 0)
        limit, others = known or 2, method in ("random", *_SEARCHES)
        if num_dags is None:
            num_dags = limit
        num_dags = check_integer("num_dags", num_dags, 1)
        if num_dags > limit and not others:
            raise ValueError(
                f"'num_dags' must be at most {limit} with method '{_name(method)}', as "
                f"there are no others, got {num_dags}"
                + ("" if known else "; use method='random' for more")
            )
        check_attr_name("prefix", prefix)
        self.num_dags = num_dags
        self.method = method
        self.seed = seed
        self.prefix = prefix

    def forward(self, data: Data) -> Data:
        """Adds the attributes to a copy of the data."""
        edge_index, num_nodes = graph_of(data)
        edge_attr = data.edge_attr
        if edge_attr is not None and not isinstance(edge_attr, Tensor):
            raise TypeError(
                "'data.edge_attr' must be a tensor with one row per edge, got "
                f"'{type(edge_attr).__name__}'"
            )
        if edge_attr is not None and edge_attr.shape[:1] != edge_index.shape[1:]:
            raise ValueError(
                "'data.edge_attr' must have one row per edge, "
                f"{edge_index.size(1)}, got shape {list(edge_attr.shape)}"
            )
        device = edge_index.device
        edges = to_numpy(edge_index)
        if self.method == "dag":
            kept = [torch.arange(edges.shape[1], device="cpu")] * self.num_dags
            both = edges.copy(), edges[::-1].copy()  # in memory of their own
            dags = [torch.from_numpy(dag) for dag in both[: self.num_dags]]
            ranks = [topological_rank(dag, num_nodes) for dag in dags]
        elif isinstance(self.method, str) and self.method in _KNOWN:
            sides = self._sides(data, num_nodes)
            kept, ranks = self._known(torch.from_numpy(edges), *sides)
            dags = [torch.from_numpy(edges[:, to_numpy(ids)]) for ids in kept]
        else:
            choices = self._choose(data, edges, num_nodes)
            kept = [torch.from_numpy(next(choices)) for _ in range(self.num_dags)]
            dags = [torch.from_numpy(edges[:, to_numpy(ids)]) for ids in kept]
            ranks = [topological_rank(dag, num_nodes) for dag in dags]
        data[f"{self.prefix}_edge_index"] = [dag.to(device) for dag in dags]
        data[f"{self.prefix}_rank"] = [rank.to(device) for rank in ranks]
        mark(data, self.prefix, dags)
        for name in list(data.keys()):  # What belonged to earlier edges.
            if name.startswith(
                (f"{self.prefix}_edge_attr", f"{self.prefix}_line_edge")
            ):
                del data[name]
        if edge_attr is not None:
            data[f"{self.prefix}_edge_attr"] = [
                edge_attr[ids.to(edge_attr.device)] for ids in kept
            ]
        return data

    def _sides(self, data: Data, num_nodes: int) -> tuple[int, int]:
        """The height and the width of the grid; a path is a grid of one row."""
        if self.method == "path":
            return min(1, num_nodes), max(1, num_nodes)
        sides = [getattr(data, name, None) for name in ("height", "width")]
        try:
            height, width = (int(side) for side in sides)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            height = width = 0
        if height < 1 or width < 1 or height * width != num_nodes:
            raise ValueError(
                "'data.height' and 'data.width' must be the numbers of rows and "
                f"columns of a grid of {num_nodes} nodes, as 'ImageToGraph' adds them, "
                f"got {sides[0]} and {sides[1]}"
            )
        return height, width

    def _known(
        self, edge_index: Tensor, height: int, width: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The edge indices of each DAG, and its ranks."""
        if not is_grid(edge_index[:, edge_index[0] != edge_index[1]], height, width):
            what = "a path with nodes numbered in order"
            if self.method == "grid":
                what = f"a grid of {height} x {width} nodes, row by row"
            number = 4 * height * width - 2 * (height + width)
            raise ValueError(
                f"'data.edge_index' must be {what}, with edges in both directions "
                f"between neighbours ({number}; got {edge_index.size(1)}, which differ "
                "from these: PyG's 'grid', for one, has diagonals and self-loops); "
                "other methods take any graph"
            )
        dags = [grid_dag(edge_index, height, width, d) for d in range(self.num_dags)]
        return [mask.nonzero().view(-1) for mask, _ in dags], [dag[1] for dag in dags]

    def _choose(
        self, data: Data, edges: np.ndarray, num_nodes: int
    ) -> Iterator[np.ndarray]:
        """The edge indices of one DAG after the other, endlessly."""
        source, target = edges
        ptr, head = _symmetric_neighbours(source, target, num_nodes)
        generator = None
        if self.seed is not None:
            # Mixed with the graph, so that different graphs get different numbers, into
            # the 32 bits of the seed that the generator uses.
            key = zlib.crc32(f"{self.seed} {num_nodes}".encode())
            key = zlib.crc32(edges.tobytes(), key)
            generator = torch.Generator().manual_seed(key)

        if self.method in _SEARCHES:
            for root in _roots(edges, num_nodes, generator):
                level, parent = search_tree(ptr, head, root)
                if self.method == "bfs_dense":
                    yield np.flatnonzero(level[source] + 1 == level[target])
                    yield np.flatnonzero(level[source] == level[target] + 1)
                else:
                    yield _first(np.flatnonzero(parent[target] == source), target)
                    yield _first(np.flatnonzero(parent[source] == target), source)

        score = self._score(data, edges, num_nodes)
        while True:
            if self.method == "random":
                score = torch.randperm(num_nodes, generator=generator, device="cpu")
            position = inverse(np.argsort(as_array(score), kind="stable"))
            yield np.flatnonzero(position[source] < position[target])
            yield np.flatnonzero(position[source] > position[target])

    def _score(self, data: Data, edges: np.ndarray, num_nodes: int) -> Tensor:
        if not callable(self.method):
            order = self.method if self.method in _SCORES else "order"
            return node_score(torch.from_numpy(edges), num_nodes, order)
        score = score_of(self.method, data, num_nodes).cpu()
        return score.double() if score.is_floating_point() else score


def _roots(
    edges: np.ndarray, num_nodes: int, generator: torch.Generator | None
) -> Iterator[np.ndarray]:
    """One root per component, and the next one in each turn, endlessly."""
    component = to_numpy(connected_components(torch.from_numpy(edges), num_nodes))
    candidates = to_numpy(torch.randperm(num_nodes, generator=generator, device="cpu"))
    candidates = candidates[np.argsort(component[candidates], kind="stable")]
    counts = np.bincount(component)
    first = np.cumsum(counts) - counts
    turn = 0
    while True:
        yield candidates[first + turn % counts]
        turn += 1


def _name(method: str | Callable) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", "custom")


def _first(ids: np.ndarray, node: np.ndarray) -> np.ndarray:
    """The first edge at each node, given and returned as ascending edge indices."""
    return ids[np.sort(np.unique(node[ids], return_index=True)[1])]


def _symmetric_neighbours(
    source: np.ndarray, target: np.ndarray, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compressed, ascending neighbours; an error unless the graph is undirected."""
    ptr, head = simple(source, target, num_nodes)
    in_ptr, tail = simple(target, source, num_nodes)
    if not (np.array_equal(ptr, in_ptr) and np.array_equal(head, tail)):
        reverse = np.isin(source * num_nodes + target, target * num_nodes + source)
        e = int(np.argmin(reverse))
        raise ValueError(
            "'data.edge_index' must hold the reverse of each edge, got edge "
            f"{source[e]} -> {target[e]} without {target[e]} -> {source[e]}; apply "
            "'torch_geometric.transforms.ToUndirected' first, or keep a DAG as it is, "
            "beside its reverse, with method='dag'"
        )
    return ptr, head
