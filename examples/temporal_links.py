"""Predicts links and ratings in a stream of events, from the states of its nodes.

Messages (CollegeMsg, 59,835 among students): which were sent, and which are made up?
Ratings: how will a user of Bitcoin OTC rate another? The first 70 % are to train, 15 %
to choose the epoch, and 15 % to test; a model knows all that was before::

    python examples/temporal_links.py   # two minutes; downloads 300 kB
    python examples/temporal_links.py --task ratings
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import pandas as pd
import torch
from matplotlib import pyplot as plt
from sklearn.metrics import average_precision_score
from torch import Tensor
from torch.nn import BatchNorm1d, Dropout, LayerNorm, Linear, ReLU, Sequential
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim.lr_scheduler import OneCycleLR
from torch_geometric import seed_everything
from torch_geometric.data import Data, TemporalData, download_url
from tqdm import trange

from pyg_chimera.nn import RGLRUConv
from pyg_chimera.transforms import EventsToDAG

C = 32  # the width of all layers; below: SNAP's files, their names here, and rates
TASKS = {"messages": ("CollegeMsg.txt.gz", "collegemsg.txt.gz", 5e-3), "ratings":
         ("soc-sign-bitcoinotc.csv.gz", "bitcoinotc.csv.gz", 2e-2)}  # fmt: skip


def load(task: str, root: str, smoke: bool = False) -> TemporalData:
    """A stream of events; ratings are messages, from -1 to 1, and whether below 0."""
    if smoke:
        src, dst, t = torch.randint(20, (3, 400)).sort().values
        more = {} if task == "messages" else {"msg": torch.rand(400, 2)}
        return TemporalData(src=src, dst=dst.flip(0), t=t, **more)
    url, name = f"https://snap.stanford.edu/data/{TASKS[task][0]}", TASKS[task][1]
    try:
        path = download_url(url, root, log=False, filename=name)
    except OSError as error:
        raise SystemExit(f"{error}: save {url} as {root}/{name}") from None
    table = pd.read_csv(path, sep="[ ,]", header=None, engine="python")
    table = table.apply(pd.to_numeric, errors="coerce").dropna()  # some have a header
    src, dst, *rating, t = torch.tensor(table.to_numpy()).t()
    _, (src, dst) = torch.stack([src, dst]).unique(return_inverse=True)
    msg = torch.stack([rating[0] / 10, rating[0] < 0], 1).float() if rating else None
    return TemporalData(src=src, dst=dst, t=t, msg=msg)[t.argsort(stable=True)]


def ask(events: TemporalData, which: Tensor, wrong: Tensor | None) -> Data:
    """The DAG of events, queries about some and `wrong` pairs, and the answers."""
    src, dst, t = (events[key][which] for key in ("src", "dst", "t"))
    if wrong is None:
        y = events.msg[which, 0]
    else:
        (src, dst), t = torch.cat([torch.stack([src, dst]), wrong], 1), t.repeat(2)
        y = (torch.arange(len(t)) < len(which)).float()
    queries = TemporalData(src=src, dst=dst, t=t)
    return EventsToDAG()(events, queries).update({"y": y})


class Model(torch.nn.Module):
    """A layer along the DAG, then a network for the state of each query."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.lin = Sequential(BatchNorm1d(in_channels), Linear(in_channels, C))
        self.norm, self.dropout = LayerNorm(C), Dropout(0.1)
        self.conv = RGLRUConv(C, heads=4, conv_kernel=1, edge_dim=4)
        self.head = Sequential(Linear(C, 64), ReLU(), Dropout(0.1), Linear(64, 64),
                               ReLU(), Linear(64, 1))  # fmt: skip

    def forward(self, dag: Data) -> Tensor:
        z = self.lin(dag.x)
        states = self.conv(self.norm(z), dag.edge_index, dag.edge_attr)
        return self.head((z + self.dropout(states))[dag.query_index]).squeeze(1)


def score(task: str, out: Tensor, y: Tensor) -> float:
    """Average precision, or minus the root mean squared error: more is better."""
    error = -mse_loss(out, y).sqrt().item()
    return error if task == "ratings" else average_precision_score(y, out)


def fit(
    args: Namespace, draw: Callable[[], Data], test: Callable[[Model], dict]
) -> dict[str, float]:
    """Scores of the best epoch, by the first of them. An epoch is a step."""
    best: dict[str, float] = {}
    model = Model(draw().num_features)
    optimizer = torch.optim.AdamW(model.parameters())
    lr, steps = TASKS[args.task][2], max(args.epochs, 11)  # some of it to warm up
    schedule = OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    loss_of = mse_loss if args.task == "ratings" else binary_cross_entropy_with_logits
    for epoch in trange(1, args.epochs + 1, leave=False):
        dag = draw()
        loss = loss_of(model.train()(dag), dag.y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        if epoch % 10 == 0 or epoch == args.epochs:
            with torch.no_grad():
                new = test(model.eval())
            best = max(best or new, new, key=lambda scores: next(iter(scores.values())))
            print(f"epoch {epoch}:", ", ".join(f"{x} {y:.4f}" for x, y in new.items()))
            for number, value in enumerate(new.values()):
                plt.plot(epoch, value, f"C{number}o")
    return best


def train(args: Namespace, events: TemporalData) -> dict[str, float]:
    """As `fit`; the scores are of validation and test."""
    val, test = int(0.7 * len(events)), int(0.85 * len(events))

    def queries(last: int, which: Tensor) -> Data:
        others = torch.randint(events.num_nodes, which.shape)
        wrong = torch.stack([events.src[which], others])
        return ask(events[:last], which, wrong if args.task == "messages" else None)

    parts = {"val": torch.arange(val, test), "test": torch.arange(test, len(events))}
    held_out = {name: queries(len(events), which) for name, which in parts.items()}

    def scores(model: Model) -> dict[str, float]:
        return {x: score(args.task, model(dag), dag.y) for x, dag in held_out.items()}

    return fit(args, lambda: queries(val, torch.arange(val)), scores)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", choices=list(TASKS), default="messages")
    add("--root", default="data/temporal")
    add("--epochs", type=int, default=60)
    add("--out", default="temporal_links.png", help="the picture; replaced if there")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="2 epochs, made-up events")
    args = parser.parse_args()
    args.epochs = 2 if args.smoke else args.epochs
    torch.set_num_threads(1)
    seed_everything(args.seed)
    best = train(args, load(args.task, args.root, args.smoke))
    plt.gca().set(xlabel="epoch", ylabel="score: validation (blue), test (orange)")
    plt.savefig(args.out, dpi=100)
    print("best:", ", ".join(f"{x} {y:.4f}" for x, y in best.items()), f"in {args.out}")
