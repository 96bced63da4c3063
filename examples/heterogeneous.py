"""A heterogeneous graph in which types of edges matter over distance.

Cities are joined by railways and by roads, and four of them have a depot, which stocks
one of four goods. Each city gets the goods of the depot that is nearest by rail; roads,
which look the same but for their type, do not count. HeteroConv (of SAGEConv), HGTConv
and HeteroLayer have about the same number of parameters, and see the same graphs::

    python examples/heterogeneous.py            # four minutes
"""

import time
from argparse import ArgumentParser

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch_geometric.data import HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import HeteroConv, HeteroDictLinear, HGTConv, SAGEConv
from torch_geometric.transforms import ToUndirected
from tqdm import tqdm, trange

from pyg_chimera.nn import ChimeraConv, GatedGCNConv, GPSLayer, HeteroLayer

GOODS, DEPOTS, TIE, EPOCHS, LR = 4, 4, -100, 8, 5e-3
#: Numbers of layers and channels.
MODELS = {"sage": (8, 22), "deep-sage": (16, 16), "hgt": (8, 20), "chimera": (2, 28)}
#: Numbers of steps by rail from a city to its depot, from and to.
BINS = {"all": (0, 99), "0-2": (0, 2), "3-5": (3, 5), "6-9": (6, 9), "10+": (10, 99)}


def draw_tree(size: int, rng: np.random.Generator) -> np.ndarray:
    """The edges of a random tree with long branches, [2, size - 1]."""
    node = np.arange(1, size)
    parent = np.where(rng.random(size - 1) < 0.15, rng.integers(0, node), node - 1)
    return rng.permutation(size)[np.stack([parent, node])]


def draw_graph(size: int, rng: np.random.Generator) -> HeteroData:
    rail, road, depot = draw_tree(size, rng), draw_tree(size, rng), np.arange(DEPOTS)
    city, goods = rng.permutation(size)[:DEPOTS], rng.integers(GOODS, size=DEPOTS)
    matrix = csr_array((np.ones(size - 1), tuple(rail)), (size, size))
    steps = shortest_path(matrix, directed=False, indices=city)
    nearest = np.where(steps == steps.min(axis=0), goods[:, None], np.nan)
    lowest, highest = np.nanmin(nearest, axis=0), np.nanmax(nearest, axis=0)

    data = HeteroData()
    data["city"].x = torch.ones(size, 1)
    data["city"].y = torch.tensor(np.where(lowest == highest, lowest, TIE)).long()
    data["city"].steps = torch.tensor(steps.min(axis=0))
    data["depot"].x = F.one_hot(torch.tensor(goods), GOODS).float()
    data["city", "rail", "city"].edge_index = torch.tensor(rail)
    data["city", "road", "city"].edge_index = torch.tensor(road)
    data["depot", "in", "city"].edge_index = torch.tensor(np.stack([depot, city]))
    return ToUndirected()(data)


def build_layer(name: str, channels: int, metadata: tuple) -> torch.nn.Module:
    if name.endswith("sage"):
        return HeteroConv({key: SAGEConv(channels, channels) for key in metadata[1]})
    if name == "hgt":
        return HGTConv(channels, channels, metadata, heads=4)
    mixer = ChimeraConv(channels, heads=4, edge_dim=channels, reach=(1, 16))
    conv = GatedGCNConv(channels, channels, edge_dim=channels)
    layer = GPSLayer(channels, conv, mixer, norm="layer_norm")
    return HeteroLayer(layer, channels, metadata)


class Model(torch.nn.Module):
    """Layers with residual sums and norms."""

    def __init__(self, name: str, metadata: tuple) -> None:
        super().__init__()
        layers, channels = MODELS[name]
        self.encoder = HeteroDictLinear(-1, channels, metadata[0])
        layer = [build_layer(name, channels, metadata) for _ in range(layers)]
        self.layers = torch.nn.ModuleList(layer)
        self.head = torch.nn.Linear(channels, GOODS)

    def forward(self, data: HeteroData) -> Tensor:
        x = self.encoder(data.x_dict)
        # All models get residual sums and norms, though a GPSLayer has its own.
        for layer in self.layers:
            out = layer(x, data.edge_index_dict)
            x = {key: x[key] + F.relu(out[key]) for key in x}
            x = {key: F.layer_norm(y, y.shape[1:]) for key, y in x.items()}
        return self.head(x["city"])


def train(model: Model, loader: DataLoader) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    schedule = OneCycleLR(optimizer, LR, total_steps=EPOCHS * len(loader))
    for _ in trange(EPOCHS, desc="epochs", leave=False):
        for data in loader:
            loss = F.cross_entropy(model(data), data["city"].y, ignore_index=TIE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracies(model: Model, loader: DataLoader) -> list[float]:
    """The share of right answers in each bin."""
    model.eval()
    found = [(model(data).argmax(dim=1), data["city"]) for data in loader]
    right = torch.cat([(out == city.y)[city.y != TIE].double() for out, city in found])
    steps = torch.cat([city.steps[city.y != TIE] for _, city in found])
    bins = [right[(low <= steps) & (steps <= high)] for low, high in BINS.values()]
    return [part.mean().item() for part in bins]


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="heterogeneous.png", help="replaced if there")
    parser.add_argument("--smoke", action="store_true", help="a few small graphs")
    args = parser.parse_args()
    size, count = (12, 8) if args.smoke else (64, 2000)
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    bar = tqdm(range(count + count // 4), "graphs", leave=False)
    graphs = [draw_graph(size, rng) for _ in bar]
    print("Accuracy at all cities, and by their steps by rail to the nearest depot:")
    print(f"{'model':<10}{'parameters':>12}{'seconds':>9}", *(f"{x:>6}" for x in BINS))
    for name in args.models:
        torch.manual_seed(args.seed)
        model = Model(name, graphs[0].metadata())
        model.eval()(graphs[0]).sum().backward()  # finds sizes, and compiles kernels
        start = time.process_time()
        train(model, DataLoader(graphs[:count], 16, shuffle=True))
        seconds = time.process_time() - start
        shares = accuracies(model, DataLoader(graphs[count:], 50))
        number = sum(x.numel() for x in model.parameters())
        shown = (f"{x:6.3f}" for x in shares)
        print(f"{name:<10}{number:>12,}{seconds:>9.0f}", *shown)
        plt.plot(list(BINS)[1:], shares[1:], "o-", label=name)
    plt.gca().set(xlabel="steps by rail to the nearest depot", ylabel="test accuracy")
    plt.legend()
    plt.savefig(args.out, dpi=100)
    print(f"Picture: {args.out}")
