"""Random models of two layers, sharded, replicated, compiled and exported.

    python tests/distributed_combinations.py --cases 300 --seed 0

Each case is a model of two layers, in `GPSLayer` or not, each with a graph of its own,
in one way: by FSDP2 or DDP in two processes, which have the same model and different
features; by `torch.compile`; or as a program of `torch.export`, of operators or, within
`ops.portable()`, of plain operations. Outputs and all gradients must be those of the
plain model in float64, or their mean over processes. A case follows from its number.
"""

import argparse
import copy
import inspect
import random
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from random_layers import CHANNELS, CONVS, KINDS, batch_of, grid_sizes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Identity, Linear, ParameterList
from torch.nn.parallel import DistributedDataParallel

from pyg_chimera import nn, ops

WAYS = ("fsdp2", "ddp", "compile", "export", "portable")
JOINT = WAYS[:2]


class Layer(torch.nn.Module):
    """A layer between projections, with the graph that it reads."""

    def __init__(self, r: random.Random, parts: list[int], in_gps: bool) -> None:
        super().__init__()
        self.name = r.choice(sorted(CONVS))
        options, kinds = CONVS[self.name](r)
        in_gps = in_gps and self.name != "GatedGCNConv" and kinds != "height"
        width = options.get("out_channels", CHANNELS)
        inner = width if in_gps else CHANNELS
        self.before = Linear(CHANNELS, inner) if in_gps else Identity()
        self.layer = getattr(nn, self.name)(inner, **options)
        names = inspect.signature(self.layer.forward).parameters
        if in_gps:
            self.layer = nn.GPSLayer(inner, mixer=self.layer, norm="layer_norm")
        self.after = Linear(width, CHANNELS)
        self.given: dict[str, Any] = {"batch": torch.tensor(parts)}
        self.edge_dim = options.get("edge_dim", 0)
        if kinds == "height":
            self.given["height"], self.given["width"] = grid_sizes(parts, r)[0]
        else:
            count = 1 if options.get("order") else options.get("num_dags", 1)
            pairs = [torch.tensor(KINDS[kinds](parts, r)) for _ in range(count)]
            edges = [x.long().view(-1, 2).t() for x in pairs]
            self.given["edge_index"] = edges if len(edges) > 1 else edges[0]
            attrs = [torch.randn(x.size(1), self.edge_dim) for x in edges]
            self.attrs = ParameterList(attrs if self.edge_dim else [])
        if options.get("rotary") and kinds == "any":
            self.given["pos"] = torch.rand(len(parts), 1).double()
        self.given["score"] = torch.rand(len(parts)).double()
        if options.get("order", "") is not None:
            del self.given["score"]
        self.given = {x: y for x, y in self.given.items() if x in names}

    def forward(self, x: Tensor) -> Tensor:
        given = dict(self.given)
        if self.edge_dim:
            attrs = list(self.attrs)
            given["edge_attr"] = attrs if len(attrs) > 1 else attrs[0]
        out = self.layer(self.before(x), **given)
        return self.after(out[0] if isinstance(out, tuple) else out)


class Case(NamedTuple):
    way: str
    what: str
    model: torch.nn.Module
    rows: int

    def x(self, seed: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * seed + rank)
        x = torch.randn(self.rows, CHANNELS, generator=generator, dtype=torch.double)
        return x.requires_grad_()


def draw(seed: int, ways: tuple[str, ...] = WAYS) -> Case:
    r = random.Random(seed)
    torch.manual_seed(seed)
    way, in_gps = r.choice(ways), r.random() < 0.5
    parts = sorted(batch_of(r.randint(2, 16), r, on_grids=True))
    layers = [Layer(r, parts, in_gps) for _ in range(2)]
    if any("height" in layer.given for layer in layers):
        layers = [Layer(r, [0] * len(parts), in_gps) for _ in range(2)]
    model = torch.nn.Sequential(*layers).double().eval()
    if r.random() < 0.5:  # not as it starts
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 3)
    names = " and ".join(layer.name for layer in layers)
    what = f"seed {seed}: {way} of {names}{' in GPSLayer' * in_gps}, {len(parts)} nodes"
    return Case(way, what, model, len(parts))


def results(run: Any, x: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    """The output, and the gradients of the features and of all parameters."""
    out = run(x)
    out.sin().sum().backward()
    found = {"output": out.detach(), "x": x.grad}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.removeprefix("module.")] = grad
    return found


def run(case: Case, seed: int, rank: int, world: int) -> str:
    """What is wrong, or "right"."""
    ranks = range(world) if case.way in JOINT else [rank]
    wants = {}
    for k in ranks:
        model = copy.deepcopy(case.model)
        wants[k] = results(model, case.x(seed, k), model)
    want = wants[rank]
    for name, y in want.items():
        if name not in ("output", "x") and y is not None:
            want[name] = sum(wants[k][name] for k in ranks) / len(ranks)
    model, x = case.model, case.x(seed, rank)
    if case.way == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model if seed % 2 else ():
            fully_shard(layer, mesh=mesh)
        call = fully_shard(model, mesh=mesh)
    elif case.way == "ddp":
        call = model = DistributedDataParallel(model, find_unused_parameters=True)
    elif case.way == "compile":
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        with ops.portable() if case.way == "portable" else nullcontext():
            call = model = torch.export.export(model, (x,)).module()
    got = results(call, x, model)
    for name, y in want.items():
        y, z = (torch.zeros(()) if g is None else g for g in (y, got[name]))
        error = float((y - z).abs().max()) if y.numel() else 0.0
        largest = float(y.abs().max()) if y.numel() else 0.0
        if not error <= 1e-9 * (1 + largest):
            return f"{name} is off by {error:.1e} of {largest:.1e}"
    return "right"


def work(rank: int, world: int, port: int, cases: range, ways: tuple[str, ...]) -> None:
    """All cases of a process: those of one alone are dealt out."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(hours=1), world, rank
    )
    counts: Counter = Counter()
    for seed in cases:
        case = draw(seed, ways)
        if case.way in JOINT or seed % world == rank:
            start = time.perf_counter()
            try:
                verdict = run(case, seed, rank, world)
            except Exception as error:
                refused = "has no portable form" in str(error)
                verdict = "refused" if refused else f"{type(error).__name__}: {error}"
            counts[
                case.way, verdict if verdict in ("right", "refused") else "WRONG"
            ] += 1
            print(
                f"{case.what}, {time.perf_counter() - start:.0f} s: {verdict}",
                flush=True,
            )
    print(rank, dict(counts), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first case's number")
    parser.add_argument("--world", type=int, default=2, help="the number of processes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    given = parser.parse_args()
    cases = range(given.seed, given.seed + given.cases)
    args = given.world, 29511, cases, tuple(given.ways)
    mp.spawn(work, args, nprocs=given.world)


if __name__ == "__main__":
    main()
