import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from pyg_chimera.ops.structure import connected_components, topological_rank
from pyg_chimera.ops.structure.centrality import closeness, pagerank
from pyg_chimera.ops.structure.csr import simple, to_numpy
from pyg_chimera.ops.structure.distance import search_tree
from pyg_chimera.transforms._inputs import check_attr_name, edges_of, score_of

__all__ = ["DAGDecomposition"]

_SCORES = ("degree", "pagerank", "closeness")
_SEARCHES = ("bfs", "bfs_dense")
_ORDERS = ("order", *_SCORES, "random", *_SEARCHES)


@functional_transform("chimera_dag_decomposition")
class DAGDecomposition(BaseTransform):
    r"""Decomposes an undirected graph into directed acyclic graphs over its nodes,
    as in `"Chimera: State Space Models Beyond Sequences"
    <https://arxiv.org/abs/2510.12111>`_ (functional name:
    :obj:`chimera_dag_decomposition`).

    DAGs come in pairs: entry :math:`2k + 1` is entry :math:`2k` with each edge reversed
    (with an odd :obj:`num_dags`, the last one has no partner). With an order other than
    a search, each edge leads from an earlier to a later node, so that each DAG
    has every undirected edge and each pair every directed one. Adds

    * :obj:`data.dag_edge_index`, a list of :obj:`num_dags` int64 tensors
      :math:`[2, |\mathcal{E}_d|]`: the edges of :obj:`data.edge_index` that each DAG
      keeps, in their order there,
    * :obj:`data.dag_edge_attr`, the list of their rows of :obj:`data.edge_attr`, if
      there is one,
    * :obj:`data.dag_rank`, a list of int64 tensors :math:`[|\mathcal{V}|]`: the
      topological rank of each node in each DAG, see
      :func:`~pyg_chimera.ops.structure.topological_rank`.

    PyG's loaders batch these lists entry by entry. Transforms that select nodes or
    edges do not update them, so apply this one after those.

    The graph must hold each edge in both directions (as after
    :class:`torch_geometric.transforms.ToUndirected`), and each direction has its
    own features. Self-loops are in no DAG. Duplicates stay together, except that a
    tree keeps one of them. Components, including isolated nodes, are decomposed
    independently.

    Args:
        num_dags (int, optional): The number of DAGs. (default: :obj:`2`)
        order (str or Callable, optional): How to choose them.

            * :obj:`"order"`: by the order of the nodes.
            * :obj:`"degree"`, :obj:`"pagerank"`, :obj:`"closeness"`: by the number of
              neighbours or a centrality of the node, highest last.
            * a function of the data that returns one score per node, of shape
              :math:`[|\mathcal{V}|]`: by that score, highest last.
            * :obj:`"random"`: by a random order for each pair.
            * :obj:`"bfs"`: the tree of a breadth-first search from a root in each
              component.
            * :obj:`"bfs_dense"`: all edges that lead one level away from that root.

            (default: :obj:`"order"`)
        reverse (bool, optional): If set to :obj:`False`, no DAG is the reverse of
            another one; each is chosen separately. (default: :obj:`True`)
        ties (str, optional): Which of several nodes of the same score is first,
            :obj:`"order"` (by number) or :obj:`"random"` (different for each pair).
            (default: :obj:`"order"`)
        root_attr (str, optional): The attribute of the data that gives the roots, as a
            mask :math:`[|\mathcal{V}|]` or as node indices. Those of a component are
            used in turn, one for each pair. Without it, and in components without a
            given root, roots are drawn at random, without repetition while there
            are others. (default: :obj:`None`)
        seed (int, optional): Makes the random choices a function of the graph, the
            same in every process and epoch. Without it, they are drawn each time
            from PyTorch's global generator. (default: :obj:`None`)
        prefix (str, optional): The prefix of the names of the attributes.
            (default: :obj:`"dag"`)

    Raises:
        TypeError: If the data is not homogeneous, or an index not integer.
        ValueError: If an argument is not as above, the order has no :obj:`num_dags`
            different DAGs, an edge lacks its reverse, or a shape or an index is wrong.
    """

    def __init__(
        self,
        num_dags: int = 2,
        order: str | Callable[[Data], Tensor] = "order",
        *,
        reverse: bool = True,
        ties: str = "order",
        root_attr: str | None = None,
        seed: int | None = None,
        prefix: str = "dag",
    ) -> None:
        if not isinstance(num_dags, int):
            raise TypeError(
                f"'num_dags' must be an integer (got '{type(num_dags).__name__}')"
            )
        if num_dags < 1:
            raise ValueError(f"'num_dags' must be at least 1 (got {num_dags})")
        if not callable(order) and order not in _ORDERS:
            raise ValueError(
                f"'order' must be a function or one of {list(_ORDERS)} (got {order!r})"
            )
        if ties not in ("order", "random"):
            raise ValueError(f"'ties' must be 'order' or 'random' (got '{ties}')")
        scored = callable(order) or order in _SCORES
        if ties == "random" and not scored:
            raise ValueError(
                f"'ties' must be 'order' where there are no scores (got '{ties}' with "
                f"order '{order}')"
            )
        if root_attr is not None and order not in _SEARCHES:
            raise ValueError(
                f"'root_attr' needs an order with roots, one of {list(_SEARCHES)} (got "
                f"'{root_attr}' with order '{order}')"
            )
        limit = 2 if reverse else 1
        if num_dags > limit and ties == "order" and (scored or order == "order"):
            raise ValueError(
                f"'num_dags' must be at most {limit} with order '{_name(order)}' "
                f"and reverse={reverse}, as there is one such order (got {num_dags}); "
                "use " + ("ties='random'" if scored else "order='random'") + " for more"
            )
        check_attr_name("prefix", prefix)
        self.num_dags = num_dags
        self.order = order
        self.reverse = reverse
        self.ties = ties
        self.root_attr = root_attr
        self.seed = seed
        self.prefix = prefix

    def forward(self, data: Data) -> Data:
        """Adds the attributes to a copy of the data."""
        edge_index, num_nodes = edges_of(data)
        edge_attr = data.edge_attr
        if edge_attr is not None and not isinstance(edge_attr, Tensor):
            raise TypeError(
                "'data.edge_attr' must be a tensor with one row per edge (got "
                f"'{type(edge_attr).__name__}')"
            )
        if edge_attr is not None and edge_attr.shape[:1] != edge_index.shape[1:]:
            raise ValueError(
                "'data.edge_attr' must have one row per edge, "
                f"{edge_index.size(1)} (got shape {list(edge_attr.shape)})"
            )
        device = edge_index.device
        edges = to_numpy(edge_index)
        choices = self._choose(data, edges, num_nodes)
        kept = [torch.from_numpy(next(choices)) for _ in range(self.num_dags)]

        dags = [torch.from_numpy(edges[:, ids.numpy()]) for ids in kept]
        ranks = [topological_rank(dag, num_nodes) for dag in dags]
        data[f"{self.prefix}_edge_index"] = [dag.to(device) for dag in dags]
        data[f"{self.prefix}_rank"] = [rank.to(device) for rank in ranks]
        attr_name = f"{self.prefix}_edge_attr"
        if edge_attr is not None:
            data[attr_name] = [edge_attr[ids.to(edge_attr.device)] for ids in kept]
        elif attr_name in data:
            del data[attr_name]  # It belonged to earlier edges.
        return data

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}(num_dags={self.num_dags}, "
            f"order='{_name(self.order)}')"
        )

    def _choose(
        self, data: Data, edges: np.ndarray, num_nodes: int
    ) -> Iterator[np.ndarray]:
        """The numbers of the edges of one DAG after the other, without end."""
        source, target = edges
        ptr, head = _symmetric_neighbours(source, target, num_nodes)
        generator = None
        if self.seed is not None:
            # Mixed with the graph, so that different graphs get different numbers,
            # in the 32 bits that the generator looks at.
            key = zlib.crc32(f"{self.seed} {num_nodes}".encode())
            key = zlib.crc32(edges.tobytes(), key)
            generator = torch.Generator().manual_seed(key)

        if self.order in _SEARCHES:
            roots = self._roots(data, edges, num_nodes, generator)
            for root in roots:
                level, parent = search_tree(ptr, head, root)
                if self.order == "bfs_dense":
                    yield np.flatnonzero(level[source] + 1 == level[target])
                    if self.reverse:
                        yield np.flatnonzero(level[source] == level[target] + 1)
                else:
                    yield _first(np.flatnonzero(parent[target] == source), target)
                    if self.reverse:
                        yield _first(np.flatnonzero(parent[source] == target), source)

        score = self._score(data, ptr, head)
        while True:
            position = np.arange(num_nodes)
            if self.order == "random" or self.ties == "random":
                position = torch.randperm(num_nodes, generator=generator).numpy()
            if score is not None:
                node = np.lexsort((position, score))
                position = np.empty_like(node)
                position[node] = np.arange(num_nodes)
            yield np.flatnonzero(position[source] < position[target])
            if self.reverse:
                yield np.flatnonzero(position[source] > position[target])

    def _score(
        self, data: Data, ptr: np.ndarray, head: np.ndarray
    ) -> np.ndarray | None:
        if callable(self.order):
            score = score_of(self.order, data, len(ptr) - 1).cpu()
            return (score.double() if score.is_floating_point() else score).numpy()
        if self.order == "degree":
            return np.diff(ptr)
        bounds = np.array([0, len(ptr) - 1])
        if self.order == "pagerank":
            return pagerank(ptr, head, bounds)
        if self.order == "closeness":
            return closeness(ptr, head, bounds)
        return None

    def _roots(
        self,
        data: Data,
        edges: np.ndarray,
        num_nodes: int,
        generator: torch.Generator | None,
    ) -> Iterator[np.ndarray]:
        """One root for each component, and the next one each time, without end."""
        component = connected_components(torch.from_numpy(edges), num_nodes).numpy()
        candidates = torch.randperm(num_nodes, generator=generator).numpy()
        if self.root_attr is not None:
            chosen = self._chosen(data, num_nodes)
            without = np.ones(num_nodes, np.bool_)
            without[component[chosen]] = False
            candidates = candidates[without[component[candidates]]]
            candidates = np.concatenate([chosen, candidates])
        candidates = candidates[np.argsort(component[candidates], kind="stable")]
        counts = np.bincount(component[candidates])
        first = np.cumsum(counts) - counts
        turn = 0
        while True:
            yield candidates[first + turn % counts]
            turn += 1

    def _chosen(self, data: Data, num_nodes: int) -> np.ndarray:
        wanted = (
            f"'data.{self.root_attr}' must be a mask of shape [{num_nodes}] or a "
            f"vector of node indices in [0, {num_nodes})"
        )
        roots = getattr(data, str(self.root_attr), None)
        if not isinstance(roots, Tensor):
            raise ValueError(f"{wanted} (got '{type(roots).__name__}')")
        if roots.dtype == torch.bool and roots.shape == (num_nodes,):
            return to_numpy(roots.nonzero().view(-1))
        if roots.dim() != 1 or roots.dtype == torch.bool or roots.is_floating_point():
            raise ValueError(
                f"{wanted} (got shape {list(roots.shape)} and dtype {roots.dtype})"
            )
        nodes = to_numpy(roots)
        wrong = nodes[(nodes < 0) | (nodes >= num_nodes)]
        if wrong.size > 0:
            raise ValueError(f"{wanted} (got {wrong[0]})")
        return nodes


def _name(order: str | Callable) -> str:
    return order if isinstance(order, str) else getattr(order, "__name__", "custom")


def _first(ids: np.ndarray, node: np.ndarray) -> np.ndarray:
    """The first of the ascending edge numbers at each node, ascending."""
    return ids[np.sort(np.unique(node[ids], return_index=True)[1])]


def _symmetric_neighbours(
    source: np.ndarray, target: np.ndarray, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compressed neighbours, ascending, of a graph that must be undirected."""
    ptr, head = simple(source, target, num_nodes)
    in_ptr, tail = simple(target, source, num_nodes)
    if not (np.array_equal(ptr, in_ptr) and np.array_equal(head, tail)):
        reverse = np.isin(source * num_nodes + target, target * num_nodes + source)
        e = int(np.argmin(reverse))
        raise ValueError(
            "'data.edge_index' must hold the reverse of each edge (got edge "
            f"{source[e]} -> {target[e]} without {target[e]} -> {source[e]}); apply "
            "'torch_geometric.transforms.ToUndirected' first"
        )
    return ptr, head
