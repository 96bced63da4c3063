"""Finds the heads in a water network from sensors at 5 % of its junctions.

Without learning, by the mean of the sensors, by harmonic interpolation and by least
squares, the heads for which demands are the most likely; and by a model, which starts
from these and is trained on other states of the network::

    python examples/water.py    # minutes, on a network of wntr; or on files of EPANET:
    python examples/water.py --train mine.inp --test mine.inp --epochs 20
    python examples/water.py --train a.inp b.inp.gz --test mine.inp  # never seen
    python examples/water.py --test mine.inp --epochs 0  # no model, seconds
"""

from argparse import ArgumentParser

import torch
from matplotlib import pyplot as plt
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from pyg_chimera.datasets import SampleSensors, WaterNetworks
from pyg_chimera.nn import ChimeraConv, GatedGCNConv, GPSLayer, GraphModel
from pyg_chimera.transforms import AddEliminationOrder

C, LR = 64, 2e-3  # C: the width of all layers
SENSORS = SampleSensors(0.05, seed=0)  # always the same, for tests
BEHIND = "Least squares, which learn nothing, are ahead of the model (docs/water.md)."
#: What is known without learning.
GUESSES = {
    "mean": lambda data: 0 * data.start,
    "interpolation": lambda data: data.harmonic,
    "least squares": lambda data: data.start,
}


def build_model() -> GraphModel:
    def layer(_: int) -> GPSLayer:
        mixer = ChimeraConv(C, heads=4, state_channels=16, edge_dim=C, reach=(4, 256))
        return GPSLayer(C, GatedGCNConv(C, C, edge_dim=C), mixer, norm_first=True)

    return GraphModel(9, C, 1, layer, num_layers=3, edge_dim=7, head="node",
                      structure={"rank": "elimination_rank"})  # fmt: skip


def errors(guess: torch.Tensor, data: Data) -> torch.Tensor:
    """In metres, where there is no sensor."""
    heads = data.sensor_mean + data.sensor_scale * guess
    return (heads - data.y).abs()[data.target_mask]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", nargs="+", default=["ky10"])
    parser.add_argument("--test", nargs="+", default=["ky10"])
    parser.add_argument("--root", default="data/water", help="for computed states")
    parser.add_argument("--epochs", type=int, default=10, help="0: no model")
    parser.add_argument("--out", default="water.png", help="replaced if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="few states, one epoch")
    args = parser.parse_args(argv)
    if args.epochs < 0:
        parser.error(f"--epochs must not be negative, got {args.epochs}")
    count, epochs = (4, min(1, args.epochs)) if args.smoke else (200, args.epochs)
    torch.manual_seed(args.seed)
    make = {"num_states": count, "pre_transform": AddEliminationOrder()}
    model, guesses = build_model(), dict(GUESSES)

    def predict(data: Data) -> torch.Tensor:
        return data.start + data.spread * model(**model.inputs(data))[:, 0]

    if epochs:
        states = WaterNetworks(args.root, args.train, **make)
        loader = DataLoader(states, 4, shuffle=True)
        optimizer, total = torch.optim.AdamW(model.parameters()), epochs * len(loader)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total)
        guesses["model"] = torch.no_grad()(predict)
    for epoch in range(epochs):
        for batch in loader:
            loss = errors(predict(batch), batch).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: last error {loss.item():.2f} m")
    model.eval()
    mean = {}
    for network in args.test:
        size = 3 * len(guesses), 3
        plt.figure(figsize=size, layout="constrained")  # that of the last is kept
        test = WaterNetworks(args.root, [network], sensors=SENSORS, seed=1, **make)
        for i, (name, guess) in enumerate(guesses.items()):
            found = [errors(guess(state), state) for state in test]
            mean[name] = torch.cat(found).mean()
            plt.subplot(1, len(guesses), i + 1, title=f"{name}: {mean[name]:.2f} m")
            at = test[0].pos[test[0].target_mask].t()
            plt.scatter(*at, 4, found[0], vmin=0, vmax=mean["mean"])
            plt.axis("equal")
            plt.axis("off")
            print(f"{test[0].name}, {plt.gca().get_title()}")
        plt.colorbar(label="error in metres", extend="max")
        if epochs and mean["model"] > mean["least squares"]:
            print(BEHIND)
    plt.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
