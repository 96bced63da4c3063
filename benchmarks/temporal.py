"""Evaluates the model of `examples/temporal_links.py` on streams of events.

Messages are evaluated as in DyGLib, which calls them UCI (Yu et al., 2023,
arxiv.org/abs/2303.13047), so that its figures may stand beside these: a tenth of the
nodes is not in training, and the average precision is the mean of those of batches, of
200 messages and as many pairs that did not write then. These are

* ``random``: the sender, and anyone who is ever written to, as in validation, and in
  training, whose recipients they are there;
* ``historical``: linked before the batch, and not in its time;
* ``inductive``: likewise, but for the first time after validation.

If there are too few of these, others are any. Ratings are those of the example::

    python benchmarks/temporal.py --root PATH           # a quarter of an hour
    python benchmarks/temporal.py --smoke

Beside the model are lookups. EdgeBank says whether a link was there before: at any
time, in the last 15 % of the past, or in as much time as passes before a link is
repeated, on average (links that are not repeated count as 0). Of ratings, it is the
mean of those that a node had, in the order of the file.

Seconds are of the processor, on one thread, for all epochs, and for tests of every
tenth. The validation part chooses the epoch.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from json_files import write_json
from options import add_output, output
from timing import machine, show
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.data import TemporalData
from workloads import REPOSITORY, SHARED

sys.path.append(str(REPOSITORY / "examples"))
import temporal_links
from temporal_links import Model, ask, fit, score, train

KINDS = ("random", "historical", "inductive")
MEMORIES = ("any time", "last 15 %", "repeated")
BATCH = 200


def parts(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The events to validate and to test, as in the example."""
    val, test = int(0.7 * size), int(0.85 * size)
    return np.arange(val, test), np.arange(test, size)


class Links:
    """Messages by number, in parts, and pairs that did not write."""

    def __init__(self, events: TemporalData) -> None:
        self.events, self.base = events, events.num_nodes
        self.src, self.dst, self.t = (events[x].numpy() for x in ("src", "dst", "t"))
        self.pair = self.code(self.src, self.dst)
        self.val, self.test = parts(len(events))
        begin = self.val[0]
        # Nodes that are new later: DyGLib's draw, from a set, is another one.
        late = np.unique([self.src[begin:], self.dst[begin:]])
        new = np.random.default_rng(2020).permutation(late)[: self.base // 10]
        has_new = np.isin(self.src, new) | np.isin(self.dst, new)
        self.train = np.flatnonzero(~has_new[:begin])

    def code(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """One number for each pair."""
        return src * self.base + dst

    def others(self, which: np.ndarray, kind: str, seed: int) -> np.ndarray:
        """Pairs of a kind, as many as these messages, which follow each other."""
        rng, found = np.random.default_rng(seed), []
        sources, sinks = np.unique(self.src), np.unique(self.dst)
        if kind == "random":
            return self.code(self.src[which], rng.choice(sinks, len(which)))
        pairs, first = np.unique(self.pair, return_index=True)
        since = self.t[first]
        for batch in batches(which):
            begin, end = self.t[batch[0]], self.t[batch[-1]]
            now = self.pair[(self.t >= begin) & (self.t <= end)]
            linked = since <= begin
            if kind == "inductive":
                linked &= since > self.t[which[0] - 1]
            old = rng.permutation(np.setdiff1d(pairs[linked], now))
            draw = (rng.choice(ends, 9 * BATCH) for ends in (sources, sinks))
            fill = rng.permutation(np.setdiff1d(self.code(*draw), self.pair[batch]))
            found.append(np.concatenate([old, fill])[: len(batch)])
        return np.concatenate(found)

    def ends(self, pairs: np.ndarray) -> Tensor:
        """Their sources and destinations, [2, P]."""
        return torch.from_numpy(np.stack(np.divmod(pairs, self.base)))

    def remembered(self, past: np.ndarray, memory: str) -> np.ndarray:
        """Pairs that EdgeBank knows after some messages."""
        pair, t = self.pair[past], self.t[past]
        if memory == "last 15 %":
            return pair[t >= np.quantile(t, 0.85)]
        if memory == "repeated":
            of = np.unique(pair, return_inverse=True)[1]
            last, first = np.full((2, of.max() + 1), t[0])
            np.maximum.at(last, of, t)
            first[of[::-1]] = t[::-1]
            gaps = (last - first) / np.maximum(np.bincount(of) - 1, 1)
            return pair[t >= t.max() - gaps.mean()]
        return pair


def batches(which: np.ndarray) -> Iterator[np.ndarray]:
    """Parts of at most 200."""
    yield from np.split(which, range(BATCH, len(which), BATCH))


def precision(right: np.ndarray, wrong: np.ndarray) -> float:
    """The mean of batches."""
    pairs = zip(batches(right), batches(wrong), strict=True)
    outs = [torch.from_numpy(np.stack(pair)).float() for pair in pairs]
    y = torch.tensor([1.0, 0.0])[:, None]
    found = [score("messages", x.flatten(), y.expand_as(x).flatten()) for x in outs]
    return float(np.mean(found))


def train_links(args: Namespace, links: Links) -> dict[str, float]:
    """As `fit` of the example."""
    past = links.events[torch.from_numpy(links.train)]
    sinks, number = past.dst.unique(), torch.arange(len(past))

    def draw() -> Any:
        anyone = sinks[torch.randint(len(sinks), number.shape)]
        return ask(past, number, torch.stack([past.src, anyone]))

    asked = {"val": (links.val, "random", 0)}
    asked |= {kind: (links.test, kind, 2) for kind in KINDS}
    held_out = {}
    for name, (which, kind, seed) in asked.items():
        wrong = links.ends(links.others(which, kind, seed))
        held_out[name] = ask(links.events, torch.from_numpy(which), wrong)

    def test(model: Model) -> dict[str, float]:
        outs = {name: model(dag).view(2, -1).numpy() for name, dag in held_out.items()}
        return {name: precision(*out) for name, out in outs.items()}

    return fit(args, draw, test)


def look_up_links(links: Links, memory: str) -> dict[str, float]:
    """The scores of EdgeBank, which knows all before a batch."""
    scores = {}
    for kind in KINDS:
        other = links.others(links.test, kind, 2)
        right, wrong = [], []
        for batch in batches(links.test):
            since = batch - links.test[0]
            past = np.concatenate([links.train, links.val, links.test[: since[0]]])
            known = links.remembered(past, memory)
            right.append(np.isin(links.pair[batch], known))
            wrong.append(np.isin(other[since], known))
        scores[kind] = precision(np.concatenate(right), np.concatenate(wrong))
    return scores


def look_up_ratings(events: TemporalData) -> dict[str, float]:
    """The scores of the mean of earlier ratings."""
    before, out = defaultdict(list), []
    for v, rating in zip(events.dst.tolist(), events.msg[:, 0].tolist(), strict=True):
        out.append(float(np.mean(before[v] or [0.0])))
        before[v].append(rating)
    out, y = torch.tensor(out), events.msg[:, 0]
    named = zip(("val", "test"), parts(len(events)), strict=True)
    return {name: score("ratings", out[which], y[which]) for name, which in named}


def measure(args: Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the results."""
    epochs = 2 if args.smoke else args.epochs
    for task in temporal_links.TASKS:
        seed_everything(0)
        events = temporal_links.load(task, str(args.root), args.smoke)
        links = Links(events) if task == "messages" else None
        for memory in MEMORIES if links else ():
            row = {"task": task, "arm": f"EdgeBank, {memory}"}
            yield row | look_up_links(links, memory)
        if links is None:
            yield {"task": task, "arm": "lookup"} | look_up_ratings(events)
        for seed in range(1 if args.smoke else args.seeds):
            show(f"{task}, seed {seed}")
            seed_everything(seed)
            one, start = Namespace(task=task, epochs=epochs), time.process_time()
            found = train_links(one, links) if links else train(one, events)
            row = {"task": task, "arm": "EventsToDAG", "seed": seed, "epochs": epochs}
            yield row | found | {"seconds": time.process_time() - start}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of means over seeds, with standard deviations, as DyGLib's of samples."""
    names = ("val", "test", *KINDS, "seconds")
    lines = [f"| task | model | seeds | {' | '.join(names)} |", f"|{' --- |' * 9}"]
    for key in dict.fromkeys((x["task"], x["arm"]) for x in rows):
        found = [x for x in rows if (x["task"], x["arm"]) == key]
        cells = [*key, str(len(found))]
        for name in names:
            values = [abs(x[name]) for x in found if name in x]
            spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
            cells.append(f"{np.mean(values):.4f} ± {spread:.4f}" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--root", type=Path, default=SHARED / "data" / "temporal", help="of the files")
    add("--seeds", type=int, default=5, help="default: 5")
    add("--epochs", type=int, default=60, help="default: 60")
    add_output(parser)
    args = parser.parse_args()
    out = output(args, "temporal-cpu")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine("cpu"), "temporal": []}
    for row in measure(args):
        results["temporal"].append(
            {x: round(y, 4) if isinstance(y, float) else y for x, y in row.items()}
        )
        write_json(out, results)
    show("")
    print(f"{markdown(results['temporal'])}\n\nWritten: {out}")


if __name__ == "__main__":
    main()
