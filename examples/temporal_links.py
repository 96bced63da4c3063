"""Predicts links and ratings in a stream of events, from the states of its nodes.

Messages (CollegeMsg, 59,835 among students): which are real, and which to anyone else
("random"), or to somebody to whom the sender wrote before ("historical")? Ratings: how
will a user of Bitcoin OTC rate another? The first 70 % of the events are to train, 15 %
to choose the epoch, and 15 % to test; a model knows all that was before::

    python examples/temporal_links.py   # two minutes; downloads 300 kB
    python examples/temporal_links.py --negatives historical  # or --task ratings
"""

import time
from argparse import ArgumentParser, Namespace

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


def negatives(events: TemporalData, which: Tensor, kind: str) -> Tensor:
    """In place of destinations: any node, or an earlier partner, if possible."""
    out = torch.randint(events.num_nodes, which.shape)
    if kind == "historical":
        src, order = events.src[which], events.src.argsort(stable=True)
        first = torch.searchsorted(events.src[order], src)  # of each source, in order
        number = order.argsort()[which] - first
        for _ in range(20):  # until it is not the right one
            found = events.dst[order[first + (torch.rand(len(src)) * number).long()]]
            out = torch.where((number > 0) & (found != events.dst[which]), found, out)
    return out


def ask(args: Namespace, events: TemporalData, which: Tensor, until: int) -> Data:
    """The DAG of the first events, with queries about some events and the answers."""
    src, dst, t = (events[key][which] for key in ("src", "dst", "t"))
    if args.task == "messages":
        wrong = negatives(events, which, args.negatives)
        src, dst, t = src.repeat(2), torch.cat([dst, wrong]), t.repeat(2)
    dag = EventsToDAG()(events[:until], TemporalData(src=src, dst=dst, t=t))
    right = (torch.arange(len(src)) < len(which)).float()
    return dag.update({"y": right if args.task == "messages" else events.msg[which, 0]})


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


def train(args: Namespace, events: TemporalData) -> tuple[float, float, float]:
    """Validation and test score of the best epoch, and processor seconds an epoch."""
    size, seconds, best = len(events), 0.0, (-1e9, 0.0)
    val, test = int(0.7 * size), int(0.85 * size)
    held_out = ask(args, events, torch.arange(val, size), size)
    model = Model(held_out.num_features)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, TASKS[args.task][2], args.epochs, pct_start=0.1)
    loss_of = mse_loss if args.task == "ratings" else binary_cross_entropy_with_logits
    for epoch in trange(1, args.epochs + 1, leave=False):
        start = time.process_time()
        dag = ask(args, events, torch.arange(val), val)
        loss = loss_of(model.train()(dag), dag.y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if epoch > 1:  # the first compiles kernels
            seconds += (time.process_time() - start) / (args.epochs - 1)
        if epoch % 10 == 0 or epoch == args.epochs:
            with torch.no_grad():
                out = model.eval()(held_out).view(-1, size - val)
            parts, y = [test - val, size - test], held_out.y.view_as(out)
            pairs = zip(out.split(parts, 1), y.split(parts, 1), strict=True)
            new = tuple(score(args.task, a.flatten(), b.flatten()) for a, b in pairs)
            best = max(best, new, key=lambda scores: scores[0])
            print(f"epoch {epoch}: val {new[0]:.4f}, test {new[1]:.4f}")
            plt.plot([epoch] * 2, new, "k:", epoch, new[0], "C0o", epoch, new[1], "C1s")
    return *best, seconds


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", choices=list(TASKS), default="messages")
    add("--negatives", choices=("random", "historical"), default="random")
    add("--root", default="data/temporal")
    add("--epochs", type=int, default=60)
    add("--out", default="temporal_links.png", help="the picture; replaced if there")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="2 epochs, made-up events")
    args = parser.parse_args()
    args.epochs = 2 if args.smoke else args.epochs
    torch.set_num_threads(1)
    seed_everything(args.seed)
    val, test, seconds = train(args, load(args.task, args.root, args.smoke))
    plt.gca().set(xlabel="epoch", ylabel="score: validation (o), test (squares)")
    plt.savefig(args.out, dpi=100)
    print(f"best: val {val:.4f}, test {test:.4f}; {seconds:.2f} s an epoch; {args.out}")
