"""What pictures show, read back from their figures."""

import sys

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from pyg_chimera.transforms import DAGDecomposition
from pyg_chimera.utils import plot_dags, plot_influence

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import colormaps, pyplot  # noqa: E402
from matplotlib.collections import LineCollection, PathCollection  # noqa: E402
from matplotlib.colors import to_rgba  # noqa: E402
from matplotlib.patches import FancyArrowPatch  # noqa: E402

EDGES = torch.tensor([[0, 1, 1, 2, 0, 2], [1, 0, 2, 1, 1, 2]])  # node 3 is alone
POSITIONS = torch.tensor([[0.0, 0], [1, 0], [2, 0], [0, 1]])
VALUES = torch.tensor([[0.0, 1.0], [1.0, -2.0], [3.0, 0.0], [4.0, 0.5]])


@pytest.fixture(autouse=True)
def _close():
    yield
    pyplot.close("all")


def panels(figure):
    """The axes that are not colour bars."""
    return [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]


def of_type(axis, kind):
    return [x for x in axis.get_children() if isinstance(x, kind)]


def nodes_of(axis):
    """Colours and positions of the nodes."""
    (nodes,) = of_type(axis, PathCollection)
    return torch.tensor(nodes.get_facecolors()), torch.tensor(nodes.get_offsets())


def expected_colors(values, cmap="viridis", low=0.0, high=None):
    high = values.max() if high is None else high
    return torch.tensor(colormaps[cmap](((values - low) / (high - low)).numpy()))


def test_graph():
    figure = plot_influence(
        VALUES, EDGES, POSITIONS, node=1, labels=["a", "$", "", "d"]
    )
    first, second = panels(figure)
    colors, positions = nodes_of(first)
    assert torch.equal(positions, POSITIONS.double())
    numpys = plot_influence(VALUES[:, 0], EDGES, POSITIONS.numpy())
    assert torch.equal(nodes_of(panels(numpys)[0])[1], POSITIONS.double())
    assert torch.allclose(colors, expected_colors(VALUES[:, 0].double()))
    signed = expected_colors(VALUES[:, 1].double(), "RdBu_r", -2.0, 2.0)
    assert torch.allclose(nodes_of(second)[0], signed)
    assert [x.get_title() for x in (first, second)] == ["head 1", "head 2"]
    named = plot_influence(VALUES, EDGES, POSITIONS, titles=["near", "far"])
    assert [x.get_title() for x in panels(named)] == ["near", "far"]
    assert [text.get_text() for text in first.texts] == ["a", "$", "", "d"]
    (nodes,) = of_type(first, PathCollection)
    red = [tuple(edge) == to_rgba("red") for edge in nodes.get_edgecolors()]
    assert red == [False, True, False, False]
    # Each edge has its reverse: a line for both and for duplicates.
    (lines,) = of_type(first, LineCollection)
    ends = {frozenset(map(tuple, x.tolist())) for x in lines.get_segments()}
    loop = frozenset({(2, 0)})
    assert ends - {loop} == {frozenset({(x, 0), (x + 1, 0)}) for x in (0, 1)}
    assert len(of_type(first, FancyArrowPatch)) == 1  # the loop


def test_an_edge_index_of_pyg():
    edges = EdgeIndex(EDGES, sparse_size=(4, 4))
    first = panels(plot_influence(VALUES, edges))[0]
    assert nodes_of(first)[1].equal(
        nodes_of(panels(plot_influence(VALUES, EDGES))[0])[1]
    )


def test_directed_graph():
    (axis,) = panels(plot_influence(VALUES[:, 0], EDGES[:, [0, 2, 2]], POSITIONS))
    assert len(of_type(axis, FancyArrowPatch)) == 2
    assert axis.get_title() == ""


def test_graph_is_laid_out():
    figures = [plot_influence(VALUES[:, :1], EDGES) for _ in range(2)]
    first, second = (nodes_of(panels(x)[0])[1] for x in figures)
    assert torch.equal(first, second)
    assert len(first.unique(dim=0)) == 4
    named = {i: (i, 0.0) for i in range(4)}
    (axis,) = panels(plot_influence(VALUES[:, :1], EDGES, named))
    assert nodes_of(axis)[1][:, 0].tolist() == [0, 1, 2, 3]


def test_grid():
    values = torch.rand(6, 5)
    figure = plot_influence(values, height=2, width=3, node=4)
    axes = panels(figure)
    assert len(axes) == 5
    for head, axis in enumerate(axes):
        (image,) = axis.images
        shown = torch.tensor(image.get_array())
        assert torch.equal(shown, values[:, head].double().view(2, 3))
        assert image.norm.vmin == 0
        assert image.norm.vmax == pytest.approx(values[:, head].max().item())
        assert axis.lines[0].get_xydata().tolist() == [[1, 1]]


def test_sentence():
    words = ["to", "be", *["or"] * 40, "$not$"]
    values = torch.rand(len(words))
    (axis,) = panels(plot_influence(values, labels=words, node=1))
    assert [text.get_text() for text in axis.texts] == words
    boxes = axis.patches
    colors = torch.tensor([box.get_facecolor() for box in boxes]).double()
    assert torch.allclose(colors, expected_colors(values.double()))
    assert boxes[1].get_edgecolor() == to_rgba("red")
    corners = {(box.get_x(), box.get_y()) for box in boxes}
    assert len(corners) == len(words)
    right, top = axis.get_xlim()[1], axis.get_ylim()
    assert all(box.get_x() + box.get_width() <= right for box in boxes)
    assert all(top[0] <= box.get_y() <= top[1] for box in boxes)
    assert len({y for _, y in corners}) == 2  # lines


def test_logarithmic_colors():
    values = torch.tensor([0.0, 1e-3, 1.0, 1e-12])
    (axis,) = panels(plot_influence(values, EDGES, POSITIONS, log=True))
    colors, _ = nodes_of(axis)
    assert tuple(colors[0].tolist()) == pytest.approx(to_rgba("lightgrey"))
    steps = torch.tensor([0.5, 1.0, 0.0]).double()
    assert torch.allclose(colors[1:], expected_colors(steps, high=1.0))
    plot_influence(torch.zeros(4), EDGES, POSITIONS, log=True)  # nothing to scale


@pytest.mark.parametrize("num_nodes", [0, 1])
def test_few_nodes_and_no_edges(num_nodes, tmp_path):
    values = torch.ones(num_nodes, 2)
    figures = [plot_influence(values, torch.empty(2, 0).long())]
    figures.append(plot_influence(values, labels=["word"] * num_nodes))
    data = Data(num_nodes=num_nodes, edge_index=torch.empty(2, 0).long())
    figures.append(plot_dags(DAGDecomposition(2)(data)))
    for figure in figures:
        figure.savefig(tmp_path / "figure.png")


def test_files(tmp_path):
    path = tmp_path / "influence.png"
    plot_influence(VALUES, EDGES, POSITIONS).savefig(path)
    image = torch.tensor(pyplot.imread(path))
    assert image.size(0) > 100
    assert len(image.flatten(0, 1).unique(dim=0)) > 10


@pytest.mark.parametrize("order", ["order", "bfs_dense"])
def test_dags(order):
    ring = to_undirected(torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]))
    data = DAGDecomposition(2, order, seed=0)(Data(edge_index=ring, num_nodes=6))
    data.pos = torch.rand(6, 2)
    figure = plot_dags(data, labels=list("abcdef"))
    assert [axis.get_title() for axis in figure.axes] == ["DAG 1", "DAG 2"]
    for axis, dag, rank in zip(
        figure.axes, data.dag_edge_index, data.dag_rank, strict=True
    ):
        colors, positions = nodes_of(axis)
        assert torch.equal(positions, data.pos.double())
        assert torch.allclose(colors, expected_colors(rank.double()))
        assert [text.get_text() for text in axis.texts] == list("abcdef")
        place = {tuple(x): i for i, x in enumerate(data.pos.tolist())}
        arrows = [
            tuple(place[tuple(end)] for end in arrow._posA_posB)
            for arrow in of_type(axis, FancyArrowPatch)
        ]
        assert sorted(arrows) == sorted(map(tuple, dag.t().tolist()))


def test_dags_of_other_names_and_places():
    data = Data(edge_index=EDGES[:, :4], num_nodes=4, pos=torch.rand(4, 3))
    data = DAGDecomposition(2, prefix="own")(data)
    first, second = plot_dags(data, prefix="own").axes
    assert torch.equal(nodes_of(first)[1], nodes_of(second)[1])
    (axis, _) = plot_dags(data, POSITIONS, prefix="own").axes
    assert torch.equal(nodes_of(axis)[1], POSITIONS.double())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "must be given for a graph .* got none"),
        ({"edge_index": EDGES, "height": 2, "width": 2}, ValueError, "leave either"),
        ({"labels": "abcd", "height": 2, "width": 2}, ValueError, "leave either out"),
        ({"labels": "abc"}, ValueError, "'labels' must have an entry for each of 4"),
        ({"edge_index": EDGES, "labels": "a"}, ValueError, "'labels' must have"),
        ({"labels": "abcd", "titles": "a"}, ValueError, "'titles' .* each of 2 heads"),
        ({"height": 2, "width": 3}, ValueError, "grid of all nodes, 4, got 2 and 3"),
        ({"height": -2, "width": -2}, ValueError, "must be positive"),
        ({"height": 4}, ValueError, "got 4 and None"),
        (
            {"labels": "abcd", "pos": POSITIONS},
            ValueError,
            "'edge_index' must be given",
        ),
        ({"edge_index": EDGES + 2}, ValueError, "edge_index"),
        ({"edge_index": EDGES.float()}, TypeError, "edge_index"),
        ({"edge_index": EDGES, "pos": EDGES}, ValueError, r"'pos' must be \[4, 2\]"),
        (
            {"edge_index": EDGES, "pos": POSITIONS / 0},
            ValueError,
            "'pos' must be finite",
        ),
        ({"labels": "abcd", "node": 4}, ValueError, r"'node' must be in \[0, 4\)"),
        ({"labels": "abcd", "log": True}, ValueError, "must not be negative with log"),
        ({"influence": [1.0]}, TypeError, "'influence' must be a torch.Tensor"),
        ({"influence": VALUES[None]}, ValueError, r"got \[1, 4, 2\]"),
        ({"influence": VALUES[:, :0]}, ValueError, r"got \[4, 0\]"),
        ({"influence": VALUES / 0, "labels": "abcd"}, ValueError, "must be finite"),
    ],
)
def test_bad_input(given, error, message):
    with pytest.raises(error, match=message):
        plot_influence(**({"influence": VALUES} | given))
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("dags", [None, [], EDGES])
def test_bad_dags(dags):
    data = Data(edge_index=EDGES, num_nodes=4)
    if dags is not None:
        data.dag_edge_index = dags
    with pytest.raises(ValueError, match=r"'data.dag_edge_index' must be a list of"):
        plot_dags(data)


def test_cycles_are_no_dags():
    data = Data(num_nodes=4, dag_edge_index=[EDGES[:, :2]])
    with pytest.raises(ValueError, match="cycle"):
        plot_dags(data)
    assert pyplot.get_fignums() == []


def test_matplotlib_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'pyg-chimera\[pictures\]'"):
        plot_influence(VALUES, EDGES, POSITIONS)


def test_nodes_that_nothing_reaches_are_grey_beside_a_single_value():
    values = torch.tensor([0.0, 0.0, 5.0, 0.0])
    (axis,) = panels(plot_influence(values, EDGES, POSITIONS, log=True))
    (nodes,) = [x for x in axis.collections if isinstance(x, PathCollection)]
    one, two, three, four = nodes.get_facecolors().tolist()
    assert one == two == four != three


def test_places_for_some_nodes_only_are_refused():
    with pytest.raises(ValueError, match=r"'pos' must have a place .* \[1, 2, 3\]"):
        plot_influence(VALUES, EDGES, {0: (0, 0)})
