"""A map of a city, coloured by where models are wrong, with and without a mixer.

Each junction has one of ten classes, which depends on roads up to 16 roads away. Three
local layers see three roads far, eight see eight, a ChimeraConv the whole city. Models
have the same processor time on one core, and validation nodes choose the epoch::

    python examples/city_roads.py                   # two minutes, downloads 2 MB
    python examples/city_roads.py --city pasadena --seconds 110 --out pasadena.png
"""

import time
from argparse import ArgumentParser, Namespace
from math import cos, isnan, pi

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import grid
from tqdm import tqdm

from pyg_chimera.datasets import CityRoads
from pyg_chimera.nn import ChimeraConv, GatedGCNConv, GPSLayer, GraphModel
from pyg_chimera.transforms import AddEliminationOrder

C, CLASSES, LR = 64, 10, 1e-2  # C: the width of all layers
# Number of layers, and whether they have a mixer.
MODELS = {"3 local layers": (3, False), "8 local layers": (8, False),
          "3 layers with ChimeraConv": (3, True)}  # fmt: skip


def load(args: Namespace) -> Data:
    """A city, with the order in which ChimeraConv eliminates its nodes."""
    order = AddEliminationOrder()
    if not args.smoke:
        try:
            return order(CityRoads(args.root, args.city, (0.6, 0.2), args.seed)[0])
        except OSError as error:
            raise SystemExit(
                f"{args.city} could not be downloaded to {args.root}: {error}. Copy "
                "this folder from where this has run with a network, or pass --smoke"
            ) from None
    edge_index, pos = grid(12, 12)  # a chessboard: how far is its centre?
    y = (pos - pos.mean(dim=0)).norm(dim=1).long()
    data = Data(pos, edge_index, torch.ones(edge_index.size(1), 1), y, pos)
    return order(RandomNodeSplit(num_val=0.2, num_test=0.2)(data))


def build_model(data: Data, num_layers: int, mixing: bool) -> GraphModel:
    def layer(_: int) -> GPSLayer:
        mixer = ChimeraConv(C, heads=4, state_channels=16, edge_dim=C, reach=(2, 32))
        conv = GatedGCNConv(C, C, edge_dim=C)
        return GPSLayer(C, conv=conv, mixer=mixer if mixing else None,
                        dropout=0.2, norm_first=True)  # fmt: skip

    return GraphModel(
        data.num_features, C, CLASSES, layer, num_layers, head="node", dropout=0.2,
        edge_dim=data.num_edge_features, norm="graph_batch_norm",
        structure={"rank": "elimination_rank"} if mixing else None,
    )  # fmt: skip


def train(model: GraphModel, data: Data, seconds: float) -> tuple[Tensor, float, int]:
    """Predicted classes and validation accuracy in the best epoch; number of epochs."""
    inputs, mask = model.inputs(data), data.train_mask
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    predicted, best, epoch, start, progress = data.y * 0, -1.0, 0, 0.0, 0.0
    bar = tqdm(total=100, unit="%", leave=False)
    while progress < 1:
        optimizer.param_groups[0]["lr"] = LR * (1 + cos(pi * progress)) / 2
        optimizer.zero_grad()
        F.cross_entropy(model.train()(**inputs)[mask], data.y[mask]).backward()
        optimizer.step()
        if epoch % 5 == 0:
            with torch.no_grad():
                out = model.eval()(**inputs).argmax(dim=1)
            if (val := float((out == data.y)[data.val_mask].float().mean())) > best:
                predicted, best = out, val
        epoch += 1  # the first is not timed, as it may compile kernels
        start = time.process_time() if epoch == 1 else start
        progress = (time.process_time() - start) / max(seconds, 1e-3)
        bar.update(min(int(100 * progress), 100) - bar.n)
    bar.close()
    return predicted, best, epoch


def draw(data: Data, panels: dict[str, Tensor], out: str) -> None:
    """Roads in the colours of their ends; grey if these have no value."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 8.6), layout="constrained")
    for ax, (title, value) in zip(axes.flat, panels.items(), strict=True):
        value = value[data.edge_index].nanmean(dim=0).numpy()
        cmap, largest = ("viridis", 9) if title == "Class" else ("RdYlBu_r", 3)
        roads = LineCollection(data.pos[data.edge_index.t()].numpy(), array=value)
        roads.set(cmap=plt.get_cmap(cmap).with_extremes(bad="0.8"), clim=(0, largest))
        roads.set(linewidths=[0.4 if isnan(number) else 1.2 for number in value])
        figure.colorbar(ax.add_collection(roads), ax=ax, location="bottom", shrink=0.7)
        ax.set(title=title, aspect=1 / data.pos[:, 1].deg2rad().cos().mean().item())
        ax.axis("off")
    figure.savefig(out, dpi=100)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="data/city-roads")
    parser.add_argument("--city", choices=["huangpu", "pasadena"], default="huangpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="city_roads.png", help="replaced if there")
    parser.add_argument("--smoke", action="store_true", help="1 s, on a chessboard")
    args = parser.parse_args(argv)
    seconds = 1.0 if args.smoke else args.seconds
    torch.set_num_threads(1)
    data = load(args)
    panels = {"Class": data.y.float()}
    for name, (num_layers, mixing) in MODELS.items():
        seed_everything(args.seed)
        model = build_model(data, num_layers, mixing)
        predicted, val, epochs = train(model, data, seconds)
        test = float((predicted == data.y)[data.test_mask].float().mean())
        print(f"{name}: {epochs} epochs, {seconds:g} s, val {val:.3f}, test {test:.3f}")
        error = (predicted - data.y).abs().where(data.test_mask, torch.nan)
        panels[f"{name}: {test:.1%} right"] = error
    draw(data, panels, args.out)
    print(f"Picture: {args.out}")


if __name__ == "__main__":
    main()
