"""Plots of influence and of DAGs, with matplotlib and networkx."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, is_undirected, to_networkx

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.common.optional import required
from pyg_chimera.ops.structure import topological_rank
from pyg_chimera.ops.structure.edges import edges_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

__all__ = ["plot_dags", "plot_influence"]

Positions = Tensor | Mapping[int, Sequence[float]] | None

_COLUMNS = 4  #: panels per row
_LINE = 72  #: characters per line of a sentence
_HERE = "red"  #: outline of the node itself
_UNREACHED = "lightgrey"


def plot_influence(
    influence: Tensor,
    edge_index: Tensor | None = None,
    pos: Positions = None,
    *,
    height: int | None = None,
    width: int | None = None,
    labels: Sequence[str] | None = None,
    node: int | None = None,
    titles: Sequence[str] | None = None,
    log: bool = False,
) -> "Figure":
    r"""Draws the influence of a node, as returned by :func:`influence`: on a graph
    (:obj:`edge_index`), as a heat map of an image grid (:obj:`height` and
    :obj:`width`), or on the words of a sentence (:obj:`labels` alone). Heads are drawn
    side by side, each with its own scale; for a single one, pass ``influence[:, :1]``.

    .. code-block:: python

        row = influence(conv, x, edge_index, node=5)
        plot_influence(row, edge_index, data.pos, node=5).savefig("influence.png")

    If there are negative values, they are blue, and positive ones red.

    Args:
        influence (torch.Tensor): The values, :math:`[|\mathcal{V}|, H]` or
            :math:`[|\mathcal{V}|]`.
        edge_index (torch.Tensor, optional): The edges of the graph, integer
            :math:`[2, |\mathcal{E}|]`; drawn as arrows, unless each has its reverse.
            (default: :obj:`None`)
        pos (torch.Tensor or dict, optional): The positions of its nodes,
            :math:`[|\mathcal{V}|, 2]`. Without them, networkx computes a spring layout.
            (default: :obj:`None`)
        height (int, optional): The number of rows of the grid, whose nodes are in
            row-major order. (default: :obj:`None`)
        width (int, optional): The number of columns of the grid. (default: :obj:`None`)
        labels (Sequence[str], optional): Labels of the nodes of a graph, or the words
            of a sentence, one for each node. (default: :obj:`None`)
        node (int, optional): The node itself, which gets a red outline. (default:
            :obj:`None`)
        titles (Sequence[str], optional): Titles of the heads. (default: :obj:`None`,
            their numbers if there are several)
        log (bool, optional): Whether colours are on a log scale, over at most six
            powers of ten; zeros are grey. (default: :obj:`False`)

    Returns:
        matplotlib.figure.Figure: The figure, created by pyplot.

    Raises:
        TypeError: If :obj:`influence` is not a tensor, or an index is not integer.
        ValueError: If neither a graph nor a grid nor a sentence is given, or several
            are, sizes don't fit, or values are not finite or, with :obj:`log`,
            negative.
        ImportError: If matplotlib is missing.
    """
    values = _values(influence, log)
    V, heads = values.shape
    is_grid = height is not None or width is not None
    if is_grid and any(x is not None for x in (edge_index, pos, labels)):
        raise ValueError(
            "'height' and 'width' are of a grid, drawn without 'edge_index', 'pos' and "
            "'labels': leave either out"
        )
    if not is_grid and edge_index is None and (pos is not None or labels is None):
        raise ValueError(
            "'edge_index' must be given for a graph and its 'pos', 'height' and "
            "'width' for a grid, or 'labels' for a sentence, got none of them"
        )
    if node is not None and not 0 <= node < V:
        raise ValueError(
            f"'node' must be in [0, {V}), as 'influence' is {list(influence.shape)}, "
            f"got {node}"
        )
    if titles is None:
        titles = [f"head {h + 1}" for h in range(heads)] if heads > 1 else [""]
    titles = _words("titles", titles, heads, "heads")
    names = None if labels is None else _words("labels", labels, V)

    if edge_index is not None:
        check_edge_index(edge_index, V)
        pos = _positions(pos, edge_index, V)
        draw = partial(_draw_graph, _graph(edge_index, V), pos, names)
        figure, axes = _panels(heads, 3.2, 2.7)
    elif names is not None:
        cells, lines = _cells(names)
        draw = partial(_draw_words, names, cells, lines)
        figure, axes = _panels(heads, 0.095 * _LINE, 0.5 + 0.25 * lines, columns=1)
    else:
        if height is None or width is None or height * width != V or height < 1:
            raise ValueError(
                "'height' and 'width' must be positive and of a grid of all nodes, "
                f"{V}, got {height} and {width}"
            )
        draw = partial(_draw_grid, height, width)
        figure, axes = _panels(heads, 2.8, 2.4)

    for head, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        colors = _colors(values[:, head], log)
        draw(axis, as_array(values[:, head]), colors, node)
        axis.set_title(title, fontsize=9)
        bar = figure.colorbar(colors, ax=axis, fraction=0.05, pad=0.02)
        bar.ax.tick_params(which="both", labelsize=7)
    return figure


def plot_dags(
    data: Data,
    pos: Positions = None,
    *,
    labels: Sequence[str] | None = None,
    prefix: str = "dag",
) -> "Figure":
    r"""Draws directed acyclic graphs, as found by
    :class:`~pyg_chimera.transforms.DAGDecomposition` for a graph, side by side. Colours
    are topological ranks, from dark (nodes without parents) to bright.

    .. code-block:: python

        data = DAGDecomposition(num_dags=4, method="bfs_dense")(data)
        plot_dags(data).savefig("dags.png")

    Args:
        data (torch_geometric.data.Data): The graph, with the edges of the DAGs in
            :obj:`data.dag_edge_index`, a list.
        pos (torch.Tensor or dict, optional): The positions of the nodes,
            :math:`[|\mathcal{V}|, 2]`. (default: :obj:`data.pos`, if it has this shape;
            otherwise a spring layout of the edges of all DAGs)
        labels (Sequence[str], optional): Labels of the nodes. (default: :obj:`None`)
        prefix (str, optional): As in
            :class:`~pyg_chimera.transforms.DAGDecomposition`. (default: :obj:`"dag"`)

    Returns:
        matplotlib.figure.Figure: The figure, created by pyplot.

    Raises:
        TypeError: If an index is not integer.
        ValueError: If there are no DAGs, or sizes don't fit.
        CycleError: If one of the graphs has a cycle.
        ImportError: If matplotlib is missing.
    """
    attr_name = f"{prefix}_edge_index"
    dags = data.get(attr_name)
    if not isinstance(dags, (list, tuple)) or len(dags) == 0:
        raise ValueError(
            f"'data.{attr_name}' must be a list of edge indices, as stored by "
            f"'pyg_chimera.transforms.DAGDecomposition', got {type(dags).__name__}"
        )
    V = int(data.num_nodes or 0)
    for dag in dags:
        check_edge_index(dag, V)
    ranks = [topological_rank(dag, V).cpu() for dag in dags]
    stored = data.pos
    if pos is None and isinstance(stored, Tensor) and stored.shape == (V, 2):
        pos = stored
    pos = _positions(pos, torch.cat(list(dags), dim=1), V)
    names = None if labels is None else _words("labels", labels, V)

    figure, axes = _panels(len(dags), 2.8, 2.6)
    for number, (axis, dag, rank) in enumerate(zip(axes, dags, ranks, strict=True)):
        graph, colors = _graph(dag, V, directed=True), _colors(rank.double(), False)
        _draw_graph(graph, pos, names, axis, as_array(rank), colors, None)
        axis.set_title(f"DAG {number + 1}", fontsize=9)
    return figure


# ---------------------------------------------------------------------------- inputs


def _values(influence: Tensor, log: bool) -> Tensor:
    """Influence as finite numbers, [V, heads]."""
    if not isinstance(influence, Tensor):
        raise TypeError(
            f"'influence' must be a torch.Tensor, got {type(influence).__name__}"
        )
    if influence.dim() not in (1, 2) or influence.shape[1:].numel() == 0:
        raise ValueError(
            "'influence' must be [nodes, heads] or [nodes], got "
            f"{list(influence.shape)}"
        )
    values = influence.detach().cpu().double()
    values = values.unsqueeze(1) if values.dim() == 1 else values
    if not bool(values.isfinite().all()):
        raise ValueError("'influence' must be finite, got NaN or infinity")
    if log and bool((values < 0).any()):
        raise ValueError(
            "'influence' must not be negative with log=True, got "
            f"{values.min().item():.3g}; take 'influence.abs()'"
        )
    return values


def _words(
    name: str, words: Sequence[str], number: int, of: str = "nodes"
) -> list[str]:
    if len(words) != number:
        raise ValueError(
            f"'{name}' must have an entry for each of {number} {of}, got {len(words)}"
        )
    return [str(word) for word in words]


def _graph(edge_index: Tensor, num_nodes: int, directed: bool = False) -> Any:
    """A networkx graph; undirected if each edge has its reverse, unless `directed`."""
    edges = coalesce(edges_of(edge_index).cpu(), num_nodes=num_nodes)
    both_ways = not directed and is_undirected(edges, num_nodes=num_nodes)
    data = Data(edge_index=edges, num_nodes=num_nodes)
    return to_networkx(data, to_undirected=both_ways)


def _positions(pos: Positions, edge_index: Tensor, num_nodes: int) -> Any:
    if pos is None:
        import networkx as nx

        return nx.spring_layout(_graph(edge_index, num_nodes), seed=0)
    if isinstance(pos, np.ndarray):
        pos = torch.from_numpy(pos)
    if not isinstance(pos, Tensor):
        missing = [node for node in range(num_nodes) if node not in pos]
        if missing:
            raise ValueError(
                f"'pos' must have a place for each of {num_nodes} nodes, got none for "
                f"{missing[:8]}"
            )
        return pos
    if pos.shape != (num_nodes, 2):
        raise ValueError(f"'pos' must be [{num_nodes}, 2], got {list(pos.shape)}")
    if not pos.isfinite().all():
        raise ValueError("'pos' must be finite, got nan or infinity")
    return dict(enumerate(pos.tolist()))


# --------------------------------------------------------------------------- drawing


def _panels(
    number: int, width: float, height: float, columns: int = _COLUMNS
) -> "tuple[Figure, list[Axes]]":
    pyplot = required("matplotlib.pyplot", "A picture", "pictures")
    columns = min(number, columns)
    rows = math.ceil(number / columns)
    size = columns * width, rows * height
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[number:]:
        axis.remove()
    return figure, list(axes.flat[:number])


def _colors(values: Tensor, log: bool) -> "ScalarMappable":
    """A colour scale for the values."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    top = values.abs().max().item() if values.numel() else 0.0
    if log and top > 0:
        least = values[values > 0].min().item()
        least = max(least, 1e-6 * top) if least < top else top / 10
        norm = LogNorm(least, top, clip=False)
        return ScalarMappable(norm, colormaps["viridis"].with_extremes(bad=_UNREACHED))
    if bool((values < 0).any()):
        return ScalarMappable(Normalize(-top, top), "RdBu_r")
    return ScalarMappable(Normalize(0, top or 1), "viridis")


def _draw_graph(
    graph: Any,
    pos: Any,
    labels: list[str] | None,
    axis: "Axes",
    values: Any,
    colors: "ScalarMappable",
    node: int | None,
) -> None:
    import networkx as nx

    size = 170 if labels else max(12, min(120, 4000 / max(1, len(graph))))
    style: dict[str, Any] = {"ax": axis, "node_size": size}
    arrows = {"arrows": True, "arrowsize": 7} if graph.is_directed() else {}
    nx.draw_networkx_edges(graph, pos, edge_color="grey", width=0.8, **style, **arrows)
    rgba = colors.to_rgba(values)
    drawn = nx.draw_networkx_nodes(
        graph,
        pos,
        node_color=rgba,
        edgecolors=[_HERE if i == node else "grey" for i in graph],
        linewidths=[2.0 if i == node else 0.5 for i in graph],
        **style,
    )
    drawn.set_zorder(2)
    for i, label in enumerate(labels or ()):
        x, y = pos[i]
        _write(axis, x, y, label, rgba[i], fontsize=7)
    axis.set_axis_off()


def _draw_grid(
    height: int,
    width: int,
    axis: "Axes",
    values: Any,
    colors: "ScalarMappable",
    node: int | None,
) -> None:
    norm: Any = colors.norm
    axis.imshow(values.reshape(height, width), cmap=colors.cmap, norm=norm)
    axis.set(xticks=[], yticks=[])
    if node is not None:
        axis.plot(node % width, node // width, "s", mfc="none", mec=_HERE)


def _cells(words: list[str]) -> tuple[list[tuple[int, int]], int]:
    """The first column and the line of each word, and the number of lines."""
    cells, left, line = [], 0, 0
    for word in words:
        if left > 0 and left + len(word) > _LINE:
            left, line = 0, line + 1
        cells.append((left, line))
        left += len(word) + 1
    return cells, line + 1


def _draw_words(
    words: list[str],
    cells: list[tuple[int, int]],
    lines: int,
    axis: "Axes",
    values: Any,
    colors: "ScalarMappable",
    node: int | None,
) -> None:
    rgba = colors.to_rgba(values)
    for i, (word, (left, line)) in enumerate(zip(words, cells, strict=True)):
        box = left, 0.8, len(word) + 0.8, -line - 0.4
        edge = _HERE if i == node else "none"
        axis.bar(*box, align="edge", color=rgba[i], edgecolor=edge)
        center = left + len(word) / 2 + 0.4
        _write(axis, center, -line, word, rgba[i], fontsize=8, family="monospace")
    axis.set(xlim=(-0.5, _LINE + 1), ylim=(0.4 - lines, 0.6))
    axis.set_axis_off()


def _write(
    axis: "Axes", x: float, y: float, text: str, background: Any, **font: Any
) -> None:
    """Writes text in black or white, whichever contrasts with the background."""
    red, green, blue, _ = background
    color = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
    font |= {"ha": "center", "va": "center", "parse_math": False, "zorder": 3}
    axis.text(x, y, text, color=color, **font)
