"""Random models of two layers, sharded, replicated, compiled and exported.

    python tests/distributed_combinations.py --cases 300 --seed 0

Each case is a model of two layers, bare, in `GPSLayer` or `GraphModel`, in one way:
FSDP2 or DDP in two processes, which have the same model and different features;
`torch.compile`; or a program of `torch.export`, of operators or (`ops.portable()`) of
plain operations. Outputs and all gradients must be those of the plain model, or their
mean over processes. Fixed programs of layers for DAGs refuse other graphs, with NaN in
plain operations, which cannot raise errors.
"""

import argparse
import copy
import inspect
import random
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from random_layers import CHANNELS, CONVS, KINDS, batch_of, grid_sizes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, ParameterList, Sequential
from torch.nn.parallel import DistributedDataParallel

from pyg_chimera import nn, ops
from pyg_chimera.ops import CycleError

WAYS = ("fsdp2", "ddp", "compile", "export", "portable")


class Layer(torch.nn.Module):
    """A layer between projections, with the graph that it reads."""

    def __init__(self, r: random.Random, parts: list[int], in_gps: bool) -> None:
        super().__init__()
        name = r.choice(sorted(CONVS))
        options, kinds = CONVS[name](r)
        in_gps = in_gps and name != "GatedGCNConv" and kinds != "height"
        width = options.get("out_channels", CHANNELS)
        inner = width if in_gps else CHANNELS
        self.name = f"{name} in GPSLayer" if in_gps else name
        self.before, self.after = Linear(CHANNELS, inner), Linear(width, CHANNELS)
        self.layer = getattr(nn, name)(inner, **options)
        known = inspect.signature(self.layer.forward).parameters
        if in_gps:
            self.layer = nn.GPSLayer(inner, mixer=self.layer, norm="layer_norm")
        given: dict[str, Any] = {"batch": torch.tensor(parts)}
        self.attrs = ParameterList()
        if kinds == "height":
            given["height"], given["width"] = grid_sizes(parts, r)[0]
        else:
            count = 1 if options.get("order") else options.get("num_dags", 1)
            pairs = [torch.tensor(KINDS[kinds](parts, r)) for _ in range(count)]
            edges = [x.long().view(-1, 2).t() for x in pairs]
            given["edge_index"] = edges if count > 1 else edges[0]
            if options.get("edge_dim"):  # with a row more, as no parameter is empty
                sizes = [(x.size(1) + 1, options["edge_dim"]) for x in edges]
                self.attrs.extend(torch.randn(size) for size in sizes)
        if options.get("rotary") and kinds == "any":
            given["pos"] = torch.rand(len(parts), 1).double()
        if options.get("order", "") is None:
            given["score"] = torch.rand(len(parts)).double()
        self.given = {x: y for x, y in given.items() if x in known}

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        """The graph of the model is not read."""
        attrs = [attr[1:] for attr in self.attrs]
        edges = {"edge_attr": attrs if len(attrs) > 1 else attrs[0]} if attrs else {}
        out = self.layer(self.before(x), **self.given, **edges)
        return self.after(out[0] if isinstance(out, tuple) else out)


def draw(seed: int) -> tuple[str, str, torch.nn.Module, list]:
    """A way, the names of layers, a model, and the inputs of two processes."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    way, kind = r.choice(WAYS), r.choice(["", "GPSLayer", "GraphModel"])
    parts = sorted(batch_of(r.randint(2, 16), r, on_grids=True))
    layers = [Layer(r, parts, kind != "") for _ in range(2)]
    if any("height" in layer.given for layer in layers):  # compilers take one grid
        layers = [Layer(r, [0] * len(parts), kind != "") for _ in range(2)]
    inputs = [(torch.randn(len(parts), CHANNELS).double(),) for _ in range(2)]
    model: torch.nn.Module = Sequential(*layers)
    if kind == "GraphModel":
        model = nn.GraphModel(CHANNELS, CHANNELS, 3, layers, head="node")
        inputs = [(x, torch.empty(2, 0, dtype=torch.long)) for (x,) in inputs]
    if r.random() < 0.5:  # not as it starts
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 3)
    names = [layer.name for layer in layers] + [kind] * (kind == "GraphModel")
    return way, f"{names}, {len(parts)} nodes", model.double().eval(), inputs


def results(run: Any, inputs: tuple, model: torch.nn.Module) -> dict[str, Tensor]:
    """The output, and the gradients that are not zero, of features and parameters."""
    x = inputs[0].clone().requires_grad_()
    out = run(x, *inputs[1:])
    out.sin().sum().backward()
    found = {"output": out.detach(), "x": x.grad}
    for key, parameter in model.named_parameters():
        grad = getattr(parameter.grad, "full_tensor", lambda y=parameter.grad: y)()
        if grad is not None and grad.any():
            found[key.removeprefix("module.")] = grad
    return found


def check(way: str, model: torch.nn.Module, inputs: list, rank: int, world: int) -> str:
    """What is wrong, or "right"."""
    wants = []
    for x in inputs[:world] if way in ("fsdp2", "ddp") else [inputs[rank]]:
        plain = copy.deepcopy(model)
        wants.append(results(plain, x, plain))
    want = {x: sum(y.get(x, 0) for y in wants) / len(wants) for y in wants for x in y}
    want |= {key: wants[rank % len(wants)][key] for key in ("output", "x")}
    call, mine = model, inputs[rank]
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for part in [y for y in model.modules() if isinstance(y, Layer)] + [model]:
            fully_shard(part, mesh=mesh)
    elif way == "ddp":
        call = model = DistributedDataParallel(model, find_unused_parameters=True)
    elif way == "compile":
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        with ops.portable() if way == "portable" else nullcontext():
            call = model = torch.export.export(model, mine).module()
    got = results(call, mine, model)
    for key in want | got:
        y, z = (torch.as_tensor(found.get(key, 0.0)) for found in (want, got))
        if way == "portable" and y.isfinite().all() and z.isnan().all():
            return "refused"
        if not (y - z).abs().max() <= 1e-8 * (1 + y.abs().max()):
            return f"{key} is off by {(y - z).abs().max():.1e} of {y.abs().max():.1e}"
    return "right"


def work(rank: int, world: int, port: int, cases: range) -> None:
    """All cases of a process: those of one alone are dealt out."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, timedelta(hours=1), world, rank)
    counts: Counter = Counter()
    for seed in cases:
        way, names, model, inputs = draw(seed)
        if way in ("fsdp2", "ddp") or seed % world == rank:
            try:
                verdict = check(way, model, inputs, rank, world)
            except Exception as error:
                verdict = f"{type(error).__name__}: {error}"
                fixed = isinstance(error, CycleError) and way in ("compile", "export")
                if "has no portable form" in verdict or fixed:
                    verdict = "refused"
            counts[way, verdict if verdict in ("right", "refused") else "WRONG"] += 1
            print(f"seed {seed}: {way} of {names}: {verdict}", flush=True)
    print(f"process {rank}:", dict(counts), flush=True)
    dist.destroy_process_group()
    sys.exit(int(any(verdict == "WRONG" for _, verdict in counts)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first case's number")
    parser.add_argument("--processes", type=int, default=2, choices=[1, 2])
    parser.add_argument("--port", type=int, default=29511)
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.cases)
    mp.spawn(work, (given.processes, given.port, seeds), nprocs=given.processes)
