"""Finds the heads in water networks never seen before, from sensors at 5 % of them.

Trains on some networks and tests on others, beside the mean of the sensors and harmonic
interpolation: heads that are means of their neighbours', weighted by conductance. That
learns nothing, and is where the model starts::

    python examples/water.py    # minutes, on networks of wntr; or on files of EPANET:
    python examples/water.py --train a.inp b.inp.gz --test mine.inp --epochs 20

A trained model may be the start, or with ``--epochs 0`` be tested as it is, on a
network that it has not seen::

    W=docs/weights/water_networks
    python examples/water.py --weights $W --epochs 0 --test Net3
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
BEHIND = "Interpolation, which learns nothing, is ahead of the model (docs/water.md)."


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
    parser.add_argument("--train", nargs="+", default=["Net2", "Net3", "ky10"])
    parser.add_argument("--test", nargs="+", default=["ky4"])
    parser.add_argument("--root", default="data/water", help="for computed states")
    parser.add_argument("--weights", help="the folder of a trained model")
    parser.add_argument("--epochs", type=int, default=10, help="0: only test")
    parser.add_argument("--out", default="water.png", help="replaced if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one epoch, a few states")
    args = parser.parse_args(argv)
    if args.epochs < 0 or not (args.epochs or args.weights):
        parser.error("--epochs must be positive, or 0 with --weights")
    count, epochs = (4, min(1, args.epochs)) if args.smoke else (200, args.epochs)
    torch.manual_seed(args.seed)
    make = {"num_states": count, "pre_transform": AddEliminationOrder()}
    given = args.weights
    model = GraphModel.from_pretrained(given) if given else build_model()

    def predict(data: Data) -> torch.Tensor:
        return data.start + data.spread * model(**model.inputs(data))[:, 0]

    if epochs:
        states = WaterNetworks(args.root, args.train, **make)
        loader = DataLoader(states, 4, shuffle=True)
        optimizer, total = torch.optim.AdamW(model.parameters()), epochs * len(loader)
        rate = LR / 2 if given else LR
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total)
    model.train()
    for epoch in range(epochs):
        for batch in loader:
            loss = errors(predict(batch), batch).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: last error {loss.item():.2f} m")
    model.eval()
    guesses = {"mean": lambda x: 0 * x.start, "harmonic": lambda x: x.start}
    guesses["model"] = torch.no_grad()(predict)
    mean = {}
    for network in args.test:
        plt.figure(figsize=(12, 4), layout="constrained")  # that of the last is kept
        test = WaterNetworks(args.root, [network], sensors=SENSORS, **make)
        for i, (name, guess) in enumerate(guesses.items()):
            found = [errors(guess(state), state) for state in test]
            mean[name] = torch.cat(found).mean()
            plt.subplot(1, 3, i + 1, title=f"{name}: {mean[name]:.2f} m")
            at = test[0].pos[test[0].target_mask].t()
            plt.scatter(*at, 4, found[0], vmin=0, vmax=mean["mean"])
            plt.axis("equal")
            plt.axis("off")
            print(f"{test[0].name}, {plt.gca().get_title()}")
        plt.colorbar(label="error in metres", extend="max")
        if mean["model"] > mean["harmonic"]:
            print(BEHIND)
    plt.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
