"""Classifies the nodes of syntax trees: graphs that are DAGs from the start.

In how many branches and loops is a piece of code nested? One counts them on the way to
the root, which may be far. States run from parents to children and back, through trees
of any depth, in one layer::

    python examples/trees.py                # a minute, no download
    python examples/trees.py --local        # a GCN of as many layers
"""

import ast
import sysconfig
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv

from pyg_chimera.nn import ChimeraDAGConv, GPSLayer, GraphModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
DEEPEST = 4  #: what is nested deeper counts as this
#: All kinds of nodes that Python's parser knows.
KINDS = sorted(
    name for name, kind in vars(ast).items()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
)  # fmt: skip


def to_graph(function: ast.FunctionDef) -> Data:
    """The syntax tree of a function, and how deeply each node is nested."""
    kinds, parents, levels = [], [], []
    todo: list[tuple[ast.AST, int, int]] = [(function, -1, 0)]
    while todo:
        node, parent, level = todo.pop()
        here = len(kinds)
        kinds.append(KINDS.index(type(node).__name__))
        parents.append(parent)
        levels.append(min(level, DEEPEST))
        level += isinstance(node, BLOCKS)
        todo += [(child, here, level) for child in ast.iter_child_nodes(node)]
    down = torch.stack([torch.tensor(parents), torch.arange(len(kinds))])[:, 1:]
    dags = [down, down.flip(0)]
    return Data(
        x=torch.tensor(kinds).view(-1, 1),
        edge_index=torch.cat(dags, dim=1),  # for the GCN
        dag_edge_index=dags,  # for the mixer; PyG shifts the numbers in each
        y=torch.tensor(levels),
    )


def load(num_files: int) -> tuple[list[Data], list[Data]]:
    """Functions of Python's own modules, for training and for tests."""

    def functions(files: list[Path]) -> Iterator[Data]:
        for file in files:
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.FunctionDef):
                    graph = to_graph(node)
                    if graph.num_nodes <= 200:
                        yield graph

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    held_out = files[3::4]  # every fourth file is for tests
    return [*functions([x for x in files if x not in held_out])], [*functions(held_out)]


def build_model(channels: int, local: bool) -> GraphModel:
    def layer(index: int) -> GPSLayer:
        mixer = ChimeraDAGConv(
            channels, channels, heads=4, state_channels=16, num_dags=2
        )
        conv = GCNConv(channels, channels)
        return GPSLayer(channels, conv, None if local else mixer)

    return GraphModel(
        [len(KINDS)], channels, DEEPEST + 1, layers=layer, num_layers=2, head="node",
        structure=None if local else {"mixer_edge_index": "dag_edge_index"},
    )  # fmt: skip


@torch.no_grad()
def answers(model: GraphModel, loader: DataLoader) -> torch.Tensor:
    """Which nodes have the right level, in their order."""
    model.eval()
    batches = (batch.to(DEVICE) for batch in loader)
    right = [model(**model.inputs(b)).argmax(dim=-1) == b.y for b in batches]
    return torch.cat(right).float().cpu()


def main(argv: list[str] | None = None) -> float:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local", action="store_true", help="without Chimera")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="trees.png", help="replaced if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few functions")
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    graphs, held_out = load(num_files=8 if args.smoke else 80)
    print(f"{len(graphs)} trees for training, {len(held_out)} for tests")
    train = DataLoader(graphs, 32, shuffle=True)
    test = DataLoader(held_out, 64)
    levels = torch.cat([graph.y for graph in held_out])
    most = float((levels == levels.mode().values).float().mean())
    print(f"Always the most frequent level: {most:.3f}")

    model = build_model(32, args.local).to(DEVICE)
    epochs = 1 if args.smoke else args.epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * len(train)
    )
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in train:
            batch = batch.to(DEVICE)
            loss = F.cross_entropy(model(**model.inputs(batch)), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        right = answers(model, test)
        found = float(right.mean())
        print(f"epoch {epoch}: last loss {loss.item():.3f}, test accuracy {found:.3f}")
    shares = [float(right[levels == level].mean()) for level in range(DEEPEST + 1)]
    plt.bar(range(DEEPEST + 1), shares)
    plt.gca().set(xlabel="level, by the answer", ylabel="test accuracy", ylim=(0, 1))
    plt.savefig(args.out, dpi=100)
    print(f"Picture: {args.out}")
    return found


if __name__ == "__main__":
    main()
