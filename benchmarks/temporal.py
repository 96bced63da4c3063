"""Compares models of streams of events: `examples/temporal_links.py`, whose layer runs
along the DAG of all events, and models that go through the stream in batches.

Links and ratings are those of the example, with its splits and its negatives; models
are judged by average precision, and by the root mean squared error of ratings::

    python benchmarks/temporal.py --root PATH           # half an hour
    python benchmarks/temporal.py --smoke

* TGN: memories of nodes, which a GRU updates (`torch_geometric.nn.TGNMemory`), and
  attention over the last ten neighbours, in the sizes of PyG's example.
* GRU memory: the same without attention.
* Lookup: links that were there before (EdgeBank), or the mean of earlier ratings.

Seconds are of the processor, on one thread, for an epoch that asks about all training
events. The validation part chooses the epoch of all models.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from json_files import write_json
from options import add_output, output
from timing import machine, show
from torch import Tensor
from torch.nn import Linear
from torch_geometric import seed_everything
from torch_geometric.data import TemporalData
from torch_geometric.nn import TGNMemory, TransformerConv
from torch_geometric.nn.models.tgn import (
    IdentityMessage,
    LastAggregator,
    LastNeighborLoader,
)
from workloads import REPOSITORY, SHARED

sys.path.append(str(REPOSITORY / "examples"))
import temporal_links
from temporal_links import negatives, score, train

TASKS = [("messages", "random"), ("messages", "historical"), ("ratings", "none")]
ARMS = ("EventsToDAG", "TGN", "GRU memory", "lookup")
CHANNELS, NEIGHBORS, BATCH, LR = 100, 10, 200, 1e-3


class Memory(torch.nn.Module):
    """Memories of nodes, and what attention adds to them, for pairs of nodes."""

    def __init__(self, events: TemporalData, attention: bool) -> None:
        super().__init__()
        C, M = CHANNELS, events.msg.size(1)
        parts = IdentityMessage(M, C, C), LastAggregator()
        self.events = events
        self.memory = TGNMemory(events.num_nodes, M, C, C, *parts)
        self.neighbors = LastNeighborLoader(events.num_nodes, NEIGHBORS)
        self.conv = None
        if attention:
            self.conv = TransformerConv(C, C // 2, 2, dropout=0.1, edge_dim=M + C)
        self.lin_src, self.lin_dst, self.out = Linear(C, C), Linear(C, C), Linear(C, 1)

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        """One number for each pair."""
        nodes, events = torch.cat([src, dst]).unique(), self.events
        if self.conv is None:
            z, _ = self.memory(nodes)
        else:
            nodes, edge_index, number = self.neighbors(nodes)
            z, last = self.memory(nodes)
            gap = (last[edge_index[0]] - events.t[number]).to(z)
            time_code = self.memory.time_enc(gap)
            edge_attr = torch.cat([time_code, events.msg[number]], 1)
            z = self.conv(z, edge_index, edge_attr)
        row = torch.empty(events.num_nodes, dtype=torch.long)
        row[nodes] = torch.arange(len(nodes))
        hidden = self.lin_src(z[row[src]]) + self.lin_dst(z[row[dst]])
        return self.out(hidden.relu()).squeeze(1)


def through(
    model: Memory, wrong: Tensor | None, begin: int, end: int, step: Any = None
) -> Tensor:
    """Outputs for events, and for their wrong destinations, batch after batch."""
    events, outs = model.events, []
    for first in range(begin, end, BATCH):
        batch = events[first : min(first + BATCH, end)]
        src, dst = batch.src, batch.dst
        if wrong is not None:
            dst = torch.cat([dst, wrong[first - begin :][: len(src)]])
            src = src.repeat(2)
        out = model(src, dst)
        model.memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
        model.neighbors.insert(batch.src, batch.dst)
        if step is not None:
            step(out, batch)
            model.memory.detach()
        outs.append(out.detach().view(-1, len(batch.src)))
    return torch.cat(outs, 1)


def train_memory(
    args: Namespace, events: TemporalData, attention: bool
) -> tuple[float, float, float]:
    """As `train` of the example."""
    size, seconds, best = len(events), 0.0, (-inf, 0.0)
    val, test = int(0.7 * size), int(0.85 * size)
    events.t = events.t.long()
    if "msg" not in events.to_dict():
        events.msg = torch.zeros(size, 1)
    model = Memory(events, attention)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    held_out = torch.arange(val, size)
    links = args.task == "messages"
    wrong = negatives(events, held_out, args.negatives) if links else None
    answers = answers_of(args.task, events, held_out)

    def step(out: Tensor, batch: TemporalData) -> None:
        y = torch.arange(2.0).flip(0).repeat_interleave(len(out) // 2)
        loss_of = F.binary_cross_entropy_with_logits if links else F.mse_loss
        loss = loss_of(out, y if links else batch.msg[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for epoch in range(args.epochs):
        show(f"{args.task}, {args.negatives}, epoch {epoch}")
        start = time.process_time()
        model.train()
        model.memory.reset_state()
        model.neighbors.reset_state()
        which = torch.arange(val)
        fresh = negatives(events, which, args.negatives) if links else None
        through(model, fresh, 0, val, step)
        if epoch > 0:  # as in the example
            seconds += (time.process_time() - start) / (args.epochs - 1)
        with torch.no_grad():
            out = through(model.eval(), wrong, val, size)
        best = max(best, scores(args.task, out, answers, test - val))
    return *best, seconds


def answers_of(task: str, events: TemporalData, which: Tensor) -> Tensor:
    """What is right about events, and about their wrong destinations."""
    if task == "ratings":
        return events.msg[which, 0].view(1, -1)
    return torch.arange(2.0).flip(0).view(2, 1).expand(2, len(which))


def scores(task: str, out: Tensor, y: Tensor, val: int) -> tuple[float, float]:
    """Of the validation part, and of the rest."""
    parts = [val, out.size(1) - val]
    pairs = zip(out.split(parts, 1), y.split(parts, 1), strict=True)
    first, second = (score(task, a.flatten(), b.flatten()) for a, b in pairs)
    return first, second


def look_up(args: Namespace, events: TemporalData) -> tuple[float, float, float]:
    """Whether a link was there before, or the mean of the ratings of a node."""
    size, seen, ratings = len(events), set(), defaultdict(list)
    val, test = int(0.7 * size), int(0.85 * size)
    held_out = torch.arange(val, size)
    out = torch.zeros(1 if args.task == "ratings" else 2, size - val)
    if args.task == "messages":
        wrong = negatives(events, held_out, args.negatives).tolist()
    for event, (u, v) in enumerate(
        zip(events.src.tolist(), events.dst.tolist(), strict=True)
    ):
        place = event - val
        if args.task == "ratings":
            if place >= 0 and ratings[v]:
                out[0, place] = float(np.mean(ratings[v]))
            ratings[v].append(float(events.msg[event, 0]))
        else:
            if place >= 0:
                out[0, place] = (u, v) in seen
                out[1, place] = (u, wrong[place]) in seen
            seen.add((u, v))
    answers = answers_of(args.task, events, held_out)
    return *scores(args.task, out, answers, test - val), 0.0


def measure(args: Namespace, task: str, kind: str, arm: str, seed: int) -> dict:
    """A row of the results."""
    seed_everything(seed)
    events = temporal_links.load(task, str(args.root), args.smoke)
    memory = arm in ("TGN", "GRU memory")
    epochs = 2 if args.smoke else args.memory_epochs if memory else args.epochs
    one = Namespace(task=task, negatives=kind, epochs=epochs)
    if memory:
        found = train_memory(one, events, arm == "TGN")
    else:
        found = (look_up if arm == "lookup" else train)(one, events)
    names = ("val", "test", "epoch")
    row = {"task": task, "negatives": kind, "arm": arm, "seed": seed, "epochs": epochs}
    return row | dict(zip(names, found, strict=True))


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of means over seeds, with the standard deviation of the test score."""
    lines = ["| task | negatives | model | seeds | val | test | s an epoch |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for key in dict.fromkeys((x["task"], x["negatives"], x["arm"]) for x in rows):
        found = [x for x in rows if (x["task"], x["negatives"], x["arm"]) == key]
        val, test, epoch = (
            np.array([x[name] for x in found]) for name in ("val", "test", "epoch")
        )
        cells = [*key, str(len(found)), f"{abs(val.mean()):.3f}"]
        cells += [f"{abs(test.mean()):.3f} ± {test.std():.3f}", f"{epoch.mean():.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--root", type=Path, default=SHARED / "data" / "temporal", help="of the files")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--seeds", type=int, default=3, help="of the example (default: 3)")
    add("--memory-seeds", type=int, default=1, help="of other models (default: 1)")
    add("--epochs", type=int, default=60, help="of the example (default: 60)")
    add("--memory-epochs", type=int, default=10, help="of memories (default: 10)")
    add_output(parser)
    args = parser.parse_args()
    out = output(args, "temporal-cpu")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine("cpu"), "temporal": []}
    for task, kind in TASKS:
        for arm in args.arms:
            seeds = args.seeds if arm == "EventsToDAG" else args.memory_seeds
            for seed in range(1 if args.smoke else seeds):
                results["temporal"].append(measure(args, task, kind, arm, seed))
                write_json(out, results)
    show("")
    print(f"{markdown(results['temporal'])}\n\nWritten: {out}")


if __name__ == "__main__":
    main()
