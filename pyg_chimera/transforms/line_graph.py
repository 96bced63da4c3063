from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.ops.structure.checksum import check_stored
from pyg_chimera.ops.structure.line_graph import line_graph, multitree
from pyg_chimera.transforms._inputs import Transform, check_attr_name, graph_of, mark

__all__ = ["DirectedLineGraph", "LineGraphData", "MultitreePruning"]

_LINES = "line_edge_index"


class LineGraphData(Data):
    r"""A graph, perhaps with a line graph, for PyG's loaders to batch correctly.

    In all other respects it is a :class:`torch_geometric.data.Data`. An attribute whose
    name contains :obj:`line_edge_index` holds indices of edges, which batching offsets
    by the number of edges; Data would offset them by the number of nodes. The prefix of
    the name refers to the edges: :obj:`dag_line_edge_index` (and
    :obj:`dag_line_edge_index_pruned`) holds indices of edges of :obj:`dag_edge_index`.
    Both may be lists of tensors.
    """

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """The offset of an attribute of the next graph in a batch."""
        prefix, found, _ = key.partition(_LINES)
        name = f"{prefix}edge_index"
        if key.startswith(_LINES) and name not in self:
            raise ValueError(
                f"'data.{key}' holds numbers of edges of 'data.{name}', without which "
                "it cannot be batched; apply what removes those to batches"
            )
        if not found or name not in self:
            return super().__inc__(key, value, *args, **kwargs)
        edges = self[name]
        if isinstance(edges, Tensor):
            return edges.size(1)
        # PyG passes the entries of a list without their positions.
        for line_edges, dag in zip(self[key], edges, strict=True):
            if line_edges is value:
                return dag.size(1)
        raise ValueError(f"'value' must be an entry of the list 'data.{key}'")


# Lets PyG load saved datasets of this class with 'weights_only=True'.
torch.serialization.add_safe_globals([LineGraphData])


@functional_transform("chimera_directed_line_graph")
class DirectedLineGraph(Transform):
    r"""Stores the line graph of a directed acyclic graph. Its nodes are the edges of
    the graph, where `"pLSTM: parallelizable Linear Source Transition Mark networks"
    <https://arxiv.org/abs/2506.11997>`_ keeps its states (functional name:
    :obj:`chimera_directed_line_graph`).

    With :obj:`line_edge_index=data.line_edge_index`, :class:`~pyg_chimera.nn.PLSTMConv`
    need not compute it. Adds

    * :obj:`data.line_edge_index`, int64 :math:`[2, |\mathcal{L}|]`: pairs of edges, the
      second of which begins where the first ends, see
      :func:`~pyg_chimera.ops.line_graph`,
    * without :obj:`prefix`, :obj:`data.line_edge_checksum`, int64
      :math:`[|\mathcal{V}|]`, for :func:`~pyg_chimera.ops.structure.check_stored`,

    and returns a :class:`LineGraphData`, which PyG's loaders batch correctly.
    Transforms that select or sort edges do not update it: apply this one after those.
    It takes single graphs, not batches.

    Args:
        prefix (str, optional): The prefix of the names of the attributes: with
            :obj:`prefix="dag"`, :obj:`data.dag_line_edge_index` is the line graph of
            :obj:`data.dag_edge_index`, or a list of line graphs for a list of DAGs,
            such as that of :class:`~pyg_chimera.transforms.DAGDecomposition`. (default:
            :obj:`None`)

    Raises:
        CycleError: If the graph has a cycle.
        TypeError: If the data is not homogeneous, is a batch, or is of a subclass of
            Data other than :class:`LineGraphData`, or an index is not integer.
        ValueError: If the prefix would make PyG batch the attribute wrongly, or the
            data has no valid edges.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = prefix
        if prefix is not None:
            check_attr_name("prefix", prefix)
        self._prefix = "" if prefix is None else f"{prefix}_"

    def forward(self, data: Data) -> LineGraphData:
        """Adds the attribute to a copy of the data."""
        dags, num_nodes = _dags_of(data, self._prefix)
        lines = [line_graph(dag, num_nodes).edge_index for dag in dags]
        out = _with_lines(data, f"{self._prefix}{_LINES}", self._prefix, lines)
        out.pop(f"{self._prefix}{_LINES}_pruned", None)  # that of another line graph
        return out


@functional_transform("chimera_multitree_pruning")
class MultitreePruning(DirectedLineGraph):
    r"""Prunes the line graph of a directed acyclic graph so that at most one path joins
    any two edges, as required by the distribution mode of `"pLSTM: parallelizable
    Linear Source Transition Mark networks" <https://arxiv.org/abs/2506.11997>`_
    (functional name: :obj:`chimera_multitree_pruning`).

    Adds the line graph :obj:`data.line_edge_index` as :class:`DirectedLineGraph` does,
    and :obj:`data.line_edge_index_pruned`, those of its columns that
    :func:`~pyg_chimera.ops.multitree` chooses. Returns a :class:`LineGraphData`. The
    pruned one is for layers with :obj:`mode="D"` only: with :obj:`mode="P"`,
    transitions would be missing.

    Arguments and errors are those of :class:`DirectedLineGraph`.
    """

    def forward(self, data: Data) -> LineGraphData:
        """Adds the attributes to a copy of the data."""
        dags, _ = _dags_of(data, self._prefix)
        out, name = super().forward(data), f"{self._prefix}{_LINES}"
        lines = out[name] if isinstance(out[name], list) else [out[name]]
        kept = [
            line_edge_index[:, multitree(line_edge_index, dag.size(1))]
            for line_edge_index, dag in zip(lines, dags, strict=True)
        ]
        return _with_lines(out, f"{name}_pruned", self._prefix, kept)


def _dags_of(data: Data, prefix: str) -> tuple[list[Tensor], int]:
    """The edges of each DAG, and the number of nodes."""
    edge_index, num_nodes = graph_of(data)
    if isinstance(data, Batch):
        raise TypeError(
            "The transform takes graphs one by one, before they are batched, got "
            f"'{type(data).__name__}'; for the line graph of a whole batch call "
            "'pyg_chimera.ops.line_graph'"
        )
    if type(data) is not Data and not isinstance(data, LineGraphData):
        raise TypeError(
            "The transform takes a 'torch_geometric.data.Data' or a 'LineGraphData', "
            f"whose batching it needs, got '{type(data).__name__}'; derive that class "
            "from 'pyg_chimera.transforms.LineGraphData'"
        )
    if not prefix:
        return [edge_index], num_nodes
    name = f"{prefix}edge_index"
    if name not in data:
        raise ValueError(f"The transform needs 'data.{name}', got {data.keys()}")
    check_stored(data, [name])
    dags = data[name]
    return (list(dags) if isinstance(dags, (list, tuple)) else [dags]), num_nodes


def _with_lines(
    data: Data, name: str, prefix: str, lines: list[Tensor]
) -> LineGraphData:
    """Converts the data to `LineGraphData`, with the line edges of each DAG."""
    if not isinstance(data, LineGraphData):
        data = LineGraphData.from_dict(data.to_dict())
    is_list = isinstance(data[f"{prefix}edge_index"], (list, tuple))
    data[name] = lines if is_list else lines[0]
    if not prefix:
        mark(data, "line_edge")
    return data
