"""Measures what suits targets that are amplitudes, solutions of linear systems.

On meshes, these are the potentials of random charges, zero on the hull; on power grids,
the voltage angles of random loads (`long_range_data/power_flow.py` says from what)::

    python benchmarks/amplitudes.py              # half an hour of one core
    python benchmarks/amplitudes.py --only poisson --arms default plain --seeds 3

Models have three layers of 64 channels, `gcn-8` eight, and equal processor time. Errors
are root mean squares relative to those of the targets, for new targets on the graphs of
training and on another; predicting zero has an error of 1.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from json_files import write_json
from long_range_data import power_flow_graphs
from options import add_output, output
from scipy.sparse import coo_array
from scipy.sparse.csgraph import laplacian
from scipy.sparse.linalg import splu
from scipy.spatial import Delaunay
from timing import machine, show
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv
from training import fit
from workloads import SHARED

from pyg_chimera.nn import ChimeraConv, GatedGCNConv, GPSLayer, GraphModel
from pyg_chimera.transforms import AddEliminationOrder

C, LR, LOSSES = 64, 3e-3, ("relative", "l1", "mse")
#: Graphs to train on, new targets on these, and another graph.
Sets = tuple[list[Data], list[Data], list[Data]]
LONG, BARE = {"reach": (8, 512)}, {"norm": None, "conv": None}
#: Arguments of ChimeraConv, and of the layer around it.
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "default, long": (LONG, {}),
    "mixer without norm": ({"norm": None}, {}),
    "mixer without norm, long": ({"norm": None, **LONG}, {}),
    "plain": ({"norm": None}, BARE),
    "plain, long": ({"norm": None, **LONG}, BARE),
    "gcn-8": ({}, {}),
}


def poisson(folder: Path, smoke: bool) -> Sets:
    nodes, meshes, samples = (100, 2, 2) if smoke else (1000, 4, 100)
    sets: Sets = ([], [], [])
    for number in range(meshes + 1):
        rng = np.random.default_rng(number)
        mesh = Delaunay(rng.random((nodes, 2)))
        corners = mesh.simplices[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
        i, j = np.unique(np.concatenate([corners, corners[:, ::-1]]), axis=0).T
        inside = np.ones(nodes, bool)
        inside[mesh.convex_hull] = False
        adjacency = coo_array((np.ones(len(i)), (i, j)), shape=(nodes,) * 2).tocsc()
        solve = splu(laplacian(adjacency)[inside][:, inside].tocsc()).solve
        for sample in range(samples + 10):
            x = np.stack([rng.standard_normal(nodes) * inside, inside], axis=1)
            y = np.zeros((nodes, 1))
            y[inside] = solve(x[inside, :1])
            data = Data(
                x=torch.from_numpy(x).float(),
                edge_index=torch.from_numpy(np.stack([i, j])).long(),
                y=torch.from_numpy(y).float(),
            )
            sets[2 if number == meshes else int(sample >= samples)].append(data)
    return sets


def power_flow(folder: Path, smoke: bool) -> Sets:
    grids, other, number = ["ACTIVSg200", "ACTIVSg500", "1354pegase"], "1888rte", 200
    if smoke:
        grids, other, number = grids[:1], grids[1], 10
    train = power_flow_graphs(folder, grids, "train", number)
    test = [power_flow_graphs(folder, x, "test", number) for x in (grids, [other])]
    return train, test[0], test[1]


TASKS: dict[str, Callable[[Path, bool], Sets]] = {
    "poisson": poisson, "power-flow": power_flow,
}  # fmt: skip


def build(arm: str, data: Data) -> GraphModel:
    if arm == "gcn-8":
        layers = [GPSLayer(C, GCNConv(C, C)) for _ in range(8)]
        return GraphModel(data.num_features, C, 1, layers, head="node")
    edge_dim = data.edge_attr.size(1) if "edge_attr" in data else None
    edges, (options, block) = None if edge_dim is None else C, ARMS[arm]

    def layer(_: int) -> GPSLayer:
        mixer = ChimeraConv(C, heads=4, state_channels=16, edge_dim=edges, **options)
        conv = GatedGCNConv(C, C, edge_dim=edges)
        return GPSLayer(C, **{"conv": conv, "mixer": mixer, **block})

    return GraphModel(
        data.num_features, C, 1, layer, 3, head="node", edge_dim=edge_dim,
        structure={"rank": "elimination_rank"},
    )  # fmt: skip


def train(sets: Sets, run: tuple[str, str, str, int], seconds: float) -> dict[str, Any]:
    task, arm, loss, seed = run
    torch.manual_seed(seed)
    model = build(arm, sets[0][0])
    batches = [[Batch.from_data_list([data]) for data in part] for part in sets]

    def error(batch: Batch, loss: str) -> Tensor:
        out = model(**model.inputs(batch))
        if task == "power-flow":  # angles are given up to a constant
            out = out - out.mean()
        if loss == "l1":
            return (out - batch.y).abs().mean()
        square = (out - batch.y).square().mean()
        return square if loss == "mse" else (square / batch.y.square().mean()).sqrt()

    def epoch() -> Iterator[Batch]:
        return (batches[0][i] for i in torch.randperm(len(sets[0])).tolist())

    first, step = batches[0][0], partial(error, loss=loss)
    row = fit(model, step, first, epoch, LR, seconds, warm_up=0.05, clip=1.0)
    model.eval()
    with torch.no_grad():
        for name, part in zip(("seen", "unseen"), batches[1:], strict=True):
            errors = torch.stack([error(batch, "relative") for batch in part])
            row[name] = errors.mean().item()
    return row | dict(zip(("task", "arm", "loss", "seed"), run, strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    add("--losses", nargs="+", choices=LOSSES, default=LOSSES[:1])
    add("--seeds", type=int, default=1)
    add("--seconds", type=float, default=120.0, help="of a core's time for each model")
    default = SHARED / "data" / "power-grids"
    add("--grids", type=Path, default=default, help="folder of power grids")
    add_output(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    out, order = output(args, "amplitudes"), AddEliminationOrder()
    results: dict[str, Any] = {"machine": machine("cpu"), "runs": []}
    for task in args.only:
        sets = TASKS[task](args.grids, args.smoke)
        scale = torch.cat([data.y for data in sets[0]]).square().mean().sqrt()
        for data in (data for part in sets for data in part):
            data.update(order(data)).y /= scale
        for run in product([task], args.arms, args.losses, range(args.seeds)):
            show(", ".join(map(str, run)))
            row = train(sets, run, 0.5 if args.smoke else args.seconds)
            results["runs"].append(row)
            print(row, flush=True)
            write_json(out, results)


if __name__ == "__main__":
    main()
