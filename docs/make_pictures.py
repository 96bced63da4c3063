"""Makes the pictures of the documentation: python docs/make_pictures.py

Needs the extra "examples". Takes about a minute on one core.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import networkx as nx
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from rdkit import Chem
from rdkit.Chem import AllChem
from scipy.spatial import Delaunay
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import from_networkx, to_undirected

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraPathConv,
    GraphModel,
    PLSTMGridConv,
)
from pyg_chimera.transforms import AddEliminationOrder, DAGDecomposition, ImageToGraph
from pyg_chimera.utils import influence, plot_dags, plot_influence

matplotlib.use("Agg")
# Names within a file are the same each time, and its text is text.
matplotlib.rcParams |= {"svg.hashsalt": "pyg_chimera", "svg.fonttype": "none"}

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

CHANNELS, HEADS, GRAPHS = 32, 2, 8
COLORS = 3  #: of marked nodes
SIDE = 12  #: of the grids

ATORVASTATIN = "CC(C)c1c(C(=O)Nc2ccccc2)c(-c2ccccc2)c(-c2ccc(F)cc2)n1CCC(O)CC(O)CC(=O)O"
TEXT = (
    "the door of the old house by the river was green when we came back in spring , "
    "although nobody could say who had done it : which colour ?"
)
SENTENCE = TEXT.split()
WORDS = ["green", "red", "blue", *sorted(set(SENTENCE) - {"green"})]


class Graph(NamedTuple):
    """A graph with categories of nodes, and the answer at each; -1 if not asked."""

    category: Tensor
    edge_index: Any
    answer: Tensor


class Model(torch.nn.Module):
    """A layer between an embedding and a classifier."""

    def __init__(self, layer: torch.nn.Module, categories: int, **kwargs: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(categories, CHANNELS)
        self.layer = layer
        self.classifier = torch.nn.Linear(CHANNELS, COLORS)
        self.kwargs = kwargs

    def forward(self, graph: Graph) -> Tensor:
        """Scores of the answers, [nodes, COLORS]."""
        x = self.embedding(graph.category)
        return self.classifier(self.layer(x, graph.edge_index, **self.kwargs))

    def row(self, graph: Graph, node: int) -> Tensor:
        """What the node hears, [nodes, HEADS]."""
        x = self.embedding(graph.category).detach()
        return influence(self.layer, x, graph.edge_index, node, **self.kwargs)


def train(model: Model, draw: Callable[[], list[Graph]], steps: int, name: str) -> None:
    """Trains a model, and prints how many answers are right in the last tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    right = []
    for _ in range(steps):
        graph = together(draw())
        out, asked = model(graph), graph.answer >= 0
        loss = F.cross_entropy(out[asked], graph.answer[asked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append((out.argmax(1) == graph.answer)[asked].float().mean())
    last = torch.stack(right[-max(1, steps // 10) :]).mean().item()
    print(f"{name}: {last:.3f} of the answers are right")


def together(graphs: list[Graph]) -> Graph:
    """One graph of several."""
    firsts = torch.tensor([0, *(len(g.category) for g in graphs[:-1])]).cumsum(0)

    def shifted(edge_indices: list[Tensor]) -> Tensor:
        pairs = zip(edge_indices, firsts, strict=True)
        return torch.cat([edges + first for edges, first in pairs], 1)

    edge_index: Any = [g.edge_index for g in graphs]
    if isinstance(edge_index[0], list):  # of DAGs
        edge_index = [shifted(list(dag)) for dag in zip(*edge_index, strict=True)]
    elif edge_index[0] is not None:
        edge_index = shifted(edge_index)
    else:
        edge_index = None
    answer = torch.cat([g.answer for g in graphs])
    return Graph(torch.cat([g.category for g in graphs]), edge_index, answer)


# ----------------------------------------------------------------------------- tasks


def tree() -> tuple[nx.Graph, Graph]:
    """A random tree. All nodes are to name the colour of the nearest of four that have
    one; the category of others is 0, and where two are equally near, nobody is asked.
    """
    graph = nx.random_labeled_tree(40, seed=int(torch.randint(1 << 30, ())))
    nodes, colors = torch.randperm(40)[:4].tolist(), [0, 1, 2, 0]
    far = torch.full((COLORS, 40), 40)
    for node, color in zip(nodes, colors, strict=True):
        for other, steps in nx.single_source_shortest_path_length(graph, node).items():
            far[color, other] = min(far[color, other], steps)
    first, second = far.sort(0).values[:2]
    category = torch.zeros(40, dtype=torch.long)
    category[nodes] = 1 + torch.tensor(colors)
    answer = far.argmin(0).where(first < second, -1)
    return graph, Graph(category, from_networkx(graph).edge_index, answer)


def hidden(number: int, categories: int) -> tuple[Tensor, int]:
    """Random categories, one of them a colour, and that colour."""
    category = torch.randint(COLORS, categories, (number,))
    color = int(torch.randint(COLORS, ()))
    category[torch.randint(number, ())] = color
    return category, color


def grid(edge_index: list[Tensor] | None) -> Graph:
    """A grid. All nodes are to name the colour of the only one that has one."""
    category, color = hidden(SIDE * SIDE, 2 * COLORS)
    return Graph(category, edge_index, torch.full_like(category, color))


def four_dags() -> list[Tensor]:
    """Edges right and down, left and down, right and up, left and up."""
    data = ImageToGraph()(torch.zeros(SIDE, SIDE))
    x, y = (data.pos[data.edge_index[1]] - data.pos[data.edge_index[0]]).t()
    ways = [(1, 1), (-1, 1), (1, -1), (-1, -1)]
    return [data.edge_index[:, a * x + b * y > 0] for a, b in ways]


def path(number: int) -> Tensor:
    """The edges of a path, both ways."""
    nodes = torch.arange(number)
    return to_undirected(torch.stack([nodes[:-1], nodes[1:]]))


def sentence() -> Graph:
    """Random words and a question mark, which is to name the only colour."""
    category, color = hidden(int(torch.randint(12, 30, ())), len(WORDS))
    category = torch.cat([category, torch.tensor([WORDS.index("?")])])
    answer = torch.full_like(category, -1)
    answer[-1] = color
    return Graph(category, path(len(category)), answer)


# -------------------------------------------------------------------------- pictures


def recurrence(steps: int) -> Any:
    """The state of one node of a planar graph, after steps of the recurrence and at its
    end, which a layer computes at once.
    """
    pos, edge_index = planar(120)
    node = int(pos.sum(1).argmin())
    conv = ChimeraConv(CHANNELS, heads=1, reach=(3, 5))
    shown = {"1 step: a local layer": 1, "3 steps: three": 3, "10 steps: ten": 10}
    shown["all steps: one ChimeraConv"] = 0
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots(1, len(shown))
    ends = pos[edge_index[:, edge_index[0] < edge_index[1]].t()]
    lines = Outline(ends.flatten(0, 1), len(ends) * [Outline.MOVETO, Outline.LINETO])
    for axis, (title, terms) in zip(axes, shown.items(), strict=True):
        conv.solver, conv.num_terms = ("neumann", terms) if terms else ("sparse", None)
        x = torch.zeros(len(pos), CHANNELS)
        options = {"role": "source", "measure": "paths"}
        state = influence(conv, x, edge_index, node, **options)[:, 0]
        axis.add_patch(PathPatch(lines, fill=False, ec="0.75", lw=0.7, clip_on=False))
        at = state > 0
        drawn = axis.scatter(
            *pos[at].t(), s=14, c=(state / state[node])[at], norm=LogNorm(1e-3, 1),
            clip_on=False, zorder=2,
        )  # fmt: skip
        axis.scatter(*pos[node], s=60, fc="none", ec="red", clip_on=False, zorder=3)
        axis.set(title=title, aspect="equal", xlim=(0, 1), ylim=(0, 1))
        axis.set_axis_off()
    figure.colorbar(drawn, ax=axes, label="state")
    return figure


def planar(number: int) -> tuple[Tensor, Tensor]:
    """Points that keep their distance, joined where no third one is as near to both as
    they are to each other's middle (the Gabriel graph).
    """
    draw = np.random.default_rng(0)
    points = draw.random((1, 2))
    while len(points) < number:
        new = draw.random((20, 2))
        apart = np.linalg.norm(new[:, None] - points, axis=2).min(axis=1)
        points = np.concatenate([points, new[[apart.argmax()]]])
    pairs = np.unique(
        np.sort(Delaunay(points).simplices[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2)),
        axis=0,
    )
    ends = points[pairs]
    middle, length = ends.mean(axis=1), np.linalg.norm(ends[:, 0] - ends[:, 1], axis=1)
    nearest = np.linalg.norm(middle[:, None] - points, axis=2).min(axis=1)
    pairs = pairs[nearest > 0.4999 * length]
    return torch.from_numpy(points).float(), to_undirected(torch.from_numpy(pairs.T))


def molecule(steps: int) -> Any:
    """Who hears an atom of a molecule, in a layer as it starts."""
    data, pos, labels = atoms()
    conv = ChimeraConv(CHANNELS, heads=HEADS)
    options = {"role": "source", "measure": "paths"}
    column = influence(conv, data.x, data.edge_index, node=38, **options)
    titles = ["head 1: 8 steps", "head 2: 32 steps"]
    return plot_influence(
        column, data.edge_index, pos, labels=labels, node=38, log=True, titles=titles
    )


def one_layer(steps: int) -> Any:
    """What the same atom hears by one layer, as it starts: a GCN's and Chimera's."""
    data, pos, labels = atoms()
    layers = {
        "GCNConv": GCNConv(CHANNELS, CHANNELS),
        "ChimeraConv": ChimeraConv(CHANNELS),
    }
    rows = [
        influence(layer, data.x, data.edge_index, node=38, measure="jacobian")
        for layer in layers.values()
    ]
    return plot_influence(
        torch.cat([row / row.max() for row in rows], 1), data.edge_index, pos,
        labels=labels, node=38, log=True, titles=[f"one {name}" for name in layers],
    )  # fmt: skip


def dags(steps: int) -> Any:
    """Its decomposition."""
    data, pos, _ = atoms()
    data = DAGDecomposition(4, method="bfs_dense", seed=0)(data)
    return plot_dags(data, pos)


def atoms() -> tuple[Data, Tensor, list[str]]:
    """A molecule, with a random vector for each element."""
    mol = Chem.MolFromSmiles(ATORVASTATIN)
    AllChem.Compute2DCoords(mol)
    pos = torch.tensor(mol.GetConformer().GetPositions()[:, :2].copy())
    bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx()) for b in mol.GetBonds()]
    labels = [atom.GetSymbol() for atom in mol.GetAtoms()]
    elements = sorted(set(labels))
    features = torch.randn(len(elements), CHANNELS)
    x = features[[elements.index(label) for label in labels]]
    data = Data(x=x, edge_index=to_undirected(torch.tensor(bonds).t()))
    return data, pos, ["" if label == "C" else label for label in labels]


def images(steps: int) -> Any:
    """What the middle of a grid hears, in two layers, before and after training."""
    category, node = grid(None).category, SIDE * 8 + 3
    layers = {
        "Chimera": (ChimeraDAGConv(CHANNELS, heads=HEADS, num_dags=4), four_dags(), {}),
        "pLSTM": (
            PLSTMGridConv(CHANNELS, heads=HEADS), None,
            {"height": SIDE, "width": SIDE},
        ),
    }  # fmt: skip
    rows, titles = [], []
    for name, (layer, edge_index, kwargs) in layers.items():
        model = Model(layer, 2 * COLORS, **kwargs)
        shown = Graph(category, edge_index, category)
        rows.append(model.row(shown, node))
        draw = partial(grid, edge_index)
        train(model, lambda draw=draw: [draw() for _ in range(GRAPHS)], steps, name)
        rows.append(model.row(shown, node))
        titles += [f"{name}, {title}" for title in when()]
    figure = plot_influence(
        torch.cat(rows, 1), height=SIDE, width=SIDE, node=node, titles=titles
    )
    row, column = divmod(int((category < COLORS).nonzero()), SIDE)
    for axis in figure.axes[: len(titles)]:
        axis.text(column, row, "A", ha="center", va="center")
    return figure


def trees(steps: int) -> Any:
    """What a node of a tree hears, before and after training."""
    graph, shown = tree()
    model = Model(ChimeraConv(CHANNELS, heads=HEADS), 1 + COLORS)
    node = int((shown.category == 0).nonzero()[0])
    rows = [model.row(shown, node)]
    draw = lambda: [tree()[1] for _ in range(GRAPHS)]  # noqa: E731
    train(model, draw, steps, "tree")
    rows.append(model.row(shown, node))
    return plot_influence(
        torch.cat(rows, 1), shown.edge_index, nx.kamada_kawai_layout(graph), node=node,
        labels=[" ABC"[c] for c in shown.category.tolist()], titles=when(),
    )  # fmt: skip


def sentences(steps: int) -> Any:
    """What the question mark hears, before and after training."""
    model = Model(ChimeraPathConv(CHANNELS, heads=HEADS), len(WORDS))
    category = torch.tensor([WORDS.index(word) for word in SENTENCE])
    number = len(SENTENCE)
    shown = Graph(category, path(number), torch.full((number,), -1))
    rows = [model.row(shown, number - 1)]
    draw = lambda: [sentence() for _ in range(4 * GRAPHS)]  # noqa: E731
    train(model, draw, steps, "sentence")
    rows.append(model.row(shown, number - 1))
    return plot_influence(
        torch.cat(rows, 1), labels=SENTENCE, node=number - 1, titles=when()
    )


def curves(steps: int) -> Any:
    """Validation on Peptides-func, over minutes and over epochs."""
    runs = json.loads((RESULTS / "peptides-func.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(10, 4), layout="constrained")
    minutes, epochs = figure.subplots(1, 2, sharey=True)
    for name, run in runs.items():
        config, history = run["config"], run["history"]
        numbers = [row["epoch"] for row in history]
        precision = [row["val_ap"] for row in history]
        label = f"{name}, test {run['best']['test_ap']:.3f}"
        (line,) = epochs.plot(numbers, precision, ".-", label=label)
        if config["minutes"]:
            share = config["minutes"] / config["epochs"]
            times = [share * number for number in numbers]
            minutes.plot(times, precision, ".-", color=line.get_color())
    minutes.set(xlabel="minutes of processor time, as planned", ylabel="validation AP")
    epochs.set(xlabel="epoch")
    epochs.legend()
    return figure


def mesh(steps: int) -> Any:
    """A solution on a mesh that was not trained on, and where two guesses miss it."""
    sys.path.append(str(ROOT / "benchmarks" / "comparisons"))
    from meshes import draw_graph, harmonic_extension, unexplained

    # The third of those of 20,000 nodes in the comparison, whose seed is 3; in tests a
    # small one.
    size = 20_000 if steps > 1 else 2000
    data = AddEliminationOrder()(draw_graph("poisson", size, [3, 2]))
    model = GraphModel.from_pretrained(ROOT / "docs" / "weights" / "poisson_meshes")
    with torch.no_grad():
        found = {
            "harmonic extension": harmonic_extension(data),
            "model": model.eval()(**model.inputs(data)),
        }
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    axes = figure.subplots(1, 3)
    corners = *data.pos.t(), data.face.t()
    images = [axes[0].tripcolor(*corners, data.y[:, 0], shading="gouraud")]
    axes[0].set_title("solution")
    most = float((found["harmonic extension"] - data.y)[data.free].abs().max())
    for axis, (name, values) in zip(axes[1:], found.items(), strict=True):
        miss = (values - data.y)[:, 0].abs() * data.free
        options = {"cmap": "magma_r", "vmin": 0, "vmax": most, "shading": "gouraud"}
        images.append(axis.tripcolor(*corners, miss, **options))
        axis.set_title(f"{name}: {float(unexplained(values, data)):.2g}")
    figure.colorbar(images[0], ax=axes[0])
    figure.colorbar(images[2], ax=axes[1:], label="error")
    for axis in axes:
        axis.set_aspect("equal")
        axis.axis("off")
    return figure


def power(_: int) -> Any:
    """Errors on power grids that were not trained on, in those of the DC start."""
    sys.path.append(str(ROOT / "benchmarks" / "comparisons"))
    from power_grids import BLIND

    file = json.loads((RESULTS / "power-grids.json").read_text(encoding="utf-8"))
    start, runs = file["rows"]["dc"], file["seeds_of"]
    runs |= {"newton-step": file["rows"]["newton-step"]}
    names = ["ACTIVSg200", "ACTIVSg500", "ACTIVSg2000", "2869pegase", "6468rte"]
    names += ["6515rte", "9241pegase", "ACTIVSg10k"]
    labels = [name + "*" * (name in BLIND) for name in names]
    arms = {"gated-gcn": "GatedGCN", "chimera": "Chimera"}
    arms["newton-step"] = "a step of Newton's method"
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, metric in zip(axes, ("angle", "magnitude"), strict=True):
        axis.axhline(1, color="gray", linewidth=0.8)
        for i, (arm, label) in enumerate(arms.items()):
            seeds = [run for name, run in runs.items() if name.startswith(arm)]
            keys = [f"{name}_{metric}" for name in names]
            heights = [[seed[key] / start[key] for seed in seeds] for key in keys]
            places = [number + 0.2 * (i - 1) for number in range(len(names))]
            axis.plot(places, heights, ".", color=f"C{i}")
            axis.plot([], [], ".", color=f"C{i}", label=label)
        axis.set(title=f"{metric}s: error over that of the DC start", yscale="log")
        axis.set_xticks(range(len(names)), labels, rotation=30, ha="right")
    axes[1].legend(loc="upper left")
    return figure


def when() -> list[str]:
    """Titles of heads, first at the start and then trained."""
    times = ("start", "trained")
    return [f"head {h + 1}, {time}" for time in times for h in range(HEADS)]


#: By file. Lines and text are sharp at any size; pixels are smaller for what has many.
PICTURES = {
    "recurrence.svg": recurrence,
    "one_layer.png": one_layer,
    "molecule.png": molecule,
    "dags.png": dags,
    "grid.png": images,
    "tree.png": trees,
    "sentence.png": sentences,
    "peptides_func.png": curves,
    "mesh.png": mesh,
    "power.png": power,
}
#: Versions of software, and dates, are left out: the same picture is the same file.
UNSAID = {".svg": ("Creator", "Date"), ".png": ("Software",)}


def main(argv: list[str] | None = None) -> None:
    """Makes all pictures."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        torch.manual_seed(0)
        figure = picture(args.steps)
        path = args.out / name
        metadata = dict.fromkeys(UNSAID[path.suffix])
        figure.savefig(path, dpi=80, metadata=metadata)


if __name__ == "__main__":
    main()
