"""Predicts properties of peptides that depend on distant atoms.

The layers are those of a graph transformer with Chimera in place of attention::

    python examples/molecules.py                             # a minute, no download
    python examples/molecules.py --local                     # without Chimera
    python examples/molecules.py --dataset peptides-func     # downloads, hours

The generated peptides have labels such as "is there an aromatic residue in the first
half of the chain?", which no neighbourhood shows.
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch_geometric import seed_everything
from torch_geometric.data import InMemoryDataset
from torch_geometric.datasets import LRGBDataset
from torch_geometric.loader import DataLoader
from torchmetrics.classification import MultilabelAveragePrecision

from pyg_chimera.datasets import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
)
from pyg_chimera.nn import ChimeraConv, GatedGCNConv, GPSLayer, GraphModel
from pyg_chimera.transforms import AddEliminationOrder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(name: str, root: str) -> list[InMemoryDataset]:
    """Graphs for training, validation and test.

    The order in which ChimeraConv eliminates atoms is stored with each molecule.
    """
    order = AddEliminationOrder()
    splits = ("train", "val", "test")
    if name == "generated":
        return [
            GeneratedPeptides(root, split, "small", pre_transform=order)
            for split in splits
        ]
    try:
        return [LRGBDataset(root, name, split, pre_transform=order) for split in splits]
    except OSError as error:
        raise SystemExit(
            f"{name} could not be downloaded to {root}: {error}. Copy that folder from "
            "where this has run with a network, or train on generated peptides"
        ) from None


def build_model(channels: int, num_tasks: int, local: bool) -> GraphModel:
    def layer(index: int) -> GPSLayer:
        mixer = ChimeraConv(
            channels, channels, heads=4, state_channels=16, edge_dim=channels
        )
        conv = GatedGCNConv(channels, channels, edge_dim=channels)
        return GPSLayer(channels, conv, None if local else mixer)

    return GraphModel(
        ATOM_FEATURE_SIZES,  # nine categories of each atom, three of each bond
        channels,
        num_tasks,
        layers=layer,
        num_layers=3,
        edge_dim=BOND_FEATURE_SIZES,
        structure=None if local else {"rank": "elimination_rank"},
    )


def train(model: GraphModel, loader: DataLoader, optimizer, schedule) -> float:
    model.train()
    total = 0.0
    for batch in loader:
        batch = batch.to(DEVICE)
        out = model(**model.inputs(batch))
        loss = F.binary_cross_entropy_with_logits(out, batch.y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += float(loss.detach()) * batch.num_graphs
    return total / len(loader.dataset)


@torch.no_grad()
def test(model: GraphModel, loader: DataLoader) -> float:
    """The mean average precision over labels."""
    model.eval()
    metric = None
    for batch in loader:
        batch = batch.to(DEVICE)
        metric = metric or MultilabelAveragePrecision(batch.y.size(1)).to(DEVICE)
        metric.update(model(**model.inputs(batch)), batch.y.long())
    return float(metric.compute())


def main(argv: list[str] | None = None) -> float:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    names = ["generated", "peptides-func"]
    parser.add_argument("--dataset", choices=names, default="generated")
    parser.add_argument("--root", default="data")
    parser.add_argument("--local", action="store_true", help="without Chimera")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--channels", type=int, default=48)
    parser.add_argument("--out", default="molecules.png", help="replaced if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one epoch of few graphs")
    args = parser.parse_args(argv)
    epochs = 1 if args.smoke else args.epochs

    seed_everything(args.seed)
    graphs = load(args.dataset, args.root)
    if args.smoke:
        graphs = [dataset[:32] for dataset in graphs]
    loaders = [DataLoader(x, 16, shuffle=i == 0) for i, x in enumerate(graphs)]
    model = build_model(args.channels, graphs[0][0].y.size(1), args.local).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * len(loaders[0])
    )
    best, curve = (-1.0, -1.0), []
    for epoch in range(1, epochs + 1):
        loss = train(model, loaders[0], optimizer, schedule)
        val, held_out = test(model, loaders[1]), test(model, loaders[2])
        curve.append((val, held_out))
        best = max(best, (val, held_out), key=lambda scores: scores[0])
        print(f"epoch {epoch}: loss {loss:.3f}, val {val:.3f}, test {held_out:.3f}")
    print(f"Test average precision in the best epoch on validation: {best[1]:.3f}")
    plt.plot(range(1, epochs + 1), curve, "o-", label=["validation", "test"])
    plt.gca().set(xlabel="epoch", ylabel="average precision", ylim=(0, 1))
    plt.legend()
    plt.savefig(args.out, dpi=100)
    print(f"Picture: {args.out}")
    return best[1]


if __name__ == "__main__":
    main()
