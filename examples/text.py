"""Trains a language model of bytes, and lets it write.

A text is a path graph, and a layer carries states from each byte to the next. In
training all positions are computed at once; in writing, each byte takes one step from
the state before it, however long the text is::

    python examples/text.py                        # Python's own sources, a minute
    python examples/text.py --file book.txt --prompt "It was "
    python examples/text.py --mixer graph_mamba    # or plstm, attention
"""

import math
import random
import sysconfig
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch_geometric import seed_everything
from torch_geometric.data import Batch

from pyg_chimera.nn import SequenceEncoder
from pyg_chimera.transforms import SequenceToGraph

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH, BATCH = 128, 16


def read(path: Path | None) -> torch.Tensor:
    """The bytes of a text file, or of some modules of the running interpreter."""
    if path is not None:
        files = [path]
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(root.glob("*.py"))[:60]
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def draw_batch(text: torch.Tensor) -> Batch:
    """Random pieces of the text as a batch of path graphs."""
    to_graph = SequenceToGraph()
    starts = [random.randrange(len(text) - LENGTH) for _ in range(BATCH)]
    pieces = (text[start : start + LENGTH] for start in starts)
    return Batch.from_data_list([to_graph(piece) for piece in pieces]).to(DEVICE)


def loss_of(model: SequenceEncoder, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next byte. The model sees the past only."""
    out = model(**model.inputs(batch)).view(BATCH, LENGTH, -1)
    y = batch.x.view(BATCH, LENGTH)
    return F.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def main(argv: list[str] | None = None) -> float:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    mixers = ["chimera", "plstm", "graph_mamba", "attention"]
    parser.add_argument("--file", type=Path, help="default: Python's own sources")
    parser.add_argument("--mixer", choices=mixers, default="chimera")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", default="text.png", help="replaced if there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    args = parser.parse_args(argv)
    if not args.prompt:
        parser.error("--prompt needs at least one character")

    seed_everything(args.seed)
    text = read(args.file)
    if len(text) <= 10 * LENGTH:
        parser.error(f"--file needs more than {10 * LENGTH} bytes")
    cut = len(text) * 9 // 10
    position = "rotary" if args.mixer == "attention" else None
    model = SequenceEncoder(
        256, 64, num_layers=2, mixer=args.mixer, head="lm", position=position
    ).to(DEVICE)
    steps = 3 if args.smoke else args.steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    curve = []
    for step in range(1, steps + 1):
        model.train()
        loss = loss_of(model, draw_batch(text[:cut]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append(loss.item() / math.log(2))
        if step % max(1, steps // 10) == 0:
            print(f"step {step}: {curve[-1]:.2f} bits per byte")

    model.eval()
    with torch.no_grad():
        held_out = [float(loss_of(model, draw_batch(text[cut:]))) for _ in range(8)]
    bits = sum(held_out) / len(held_out) / math.log(2)
    print(f"Held-out text: {bits:.2f} bits per byte")
    prompt = torch.tensor(list(args.prompt.encode()), device=DEVICE)
    written = model.generate(prompt, 20 if args.smoke else 300, temperature=0.7)
    print(bytes(written.tolist()).decode(errors="replace"))
    plt.plot(curve)
    plt.axhline(bits, color="0.6", label="held-out text, in the end")
    plt.gca().set(xlabel="step", ylabel="bits per byte", ylim=(0, 8))
    plt.legend()
    plt.savefig(args.out, dpi=100)
    print(f"Picture: {args.out}")
    return bits


if __name__ == "__main__":
    main()
