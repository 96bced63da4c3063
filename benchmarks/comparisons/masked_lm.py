r"""Compares mixing layers on text: which letters are hidden, or which comes next?

Without arguments it trains Chimera and attention as masked language models on the
sources of Python's standard library, byte by byte, with no download::

    python benchmarks/comparisons/masked_lm.py

Any text is a file of ``--root``, split in three from its beginning to its end::

    python benchmarks/comparisons/masked_lm.py --root text --text tinyshakespeare.txt
    python benchmarks/comparisons/masked_lm.py \
        --models chimera chimera-path plstm graph-mamba \
        attention-learned attention-rotary --minutes 20
    python benchmarks/comparisons/masked_lm.py --causal --prompt 'def '  # the next byte

All models have the same number of parameters and train for the same time, at one
length; they are tested at this one, at 512 and at 2,048, as far as they can. 30 % of
the bytes are hidden. The hybrid layers and the plain ones beside them, in
``docs/hybrids.md``, are::

    python benchmarks/comparisons/masked_lm.py --seeds 3 --minutes 5 \
        --models gated-delta surprise differential hierarchical depths \
        attention-window differential-window latent-window griffin review proposed

A run can be stopped (Ctrl-C, ``--time-limit``) and continued with
``--resume``. ``sentences.py`` fine-tunes masked models on sentences.
"""

import sys
import sysconfig
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    RANK,
    Task,
    epochs_within,
    fit,
    fit_all,
    load_best,
    main,
    make_parser,
    match_size,
    open_run,
    parse,
    planned_epochs,
    positive_float,
    positive_int,
)
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from pyg_chimera.nn import GraphModel, HybridModel, SequenceEncoder
from pyg_chimera.transforms import SequenceToGraph

#: Variants of SequenceEncoder, by name: the mixer, and attention's positions.
ENCODERS: dict[str, dict[str, str]] = {
    "chimera": {"mixer": "chimera"},
    "chimera-path": {"mixer": "chimera_path"},
    "plstm": {"mixer": "plstm"},
    "graph-mamba": {"mixer": "graph_mamba"},
    "attention": {"mixer": "attention"},
    "attention-learned": {"mixer": "attention", "position": "learned"},
    "attention-rotary": {"mixer": "attention", "position": "rotary"},
}
#: Variants of HybridModel, by name: its pattern of recurrences (r) and attention (a),
#: and their kinds.
HYBRIDS: dict[str, dict[str, Any]] = {
    "gated-delta": {"pattern": "r"},
    "attention-window": {"pattern": "a"},
    "hybrid": {"pattern": "rra"},
    "rg-lru": {"pattern": "r", "recurrence": "rg_lru"},
    "griffin": {"pattern": "rra", "recurrence": "rg_lru"},
    "surprise": {"pattern": "r", "recurrence": "surprise"},
    "differential": {"pattern": "r", "recurrence": "differential"},
    "hierarchical": {"pattern": "r", "recurrence": "hierarchical"},
    "depths": {"pattern": "r", "capacity": 0.5},
    "differential-window": {"pattern": "a", "attention": "differential"},
    "latent-window": {"pattern": "a", "attention": "latent"},
    "review": {"pattern": "rra", "recurrence": "rg_lru", "attention": "window"},
    "proposed": {
        "pattern": "rrra", "recurrence": "surprise", "attention": "differential"
    },
}  # fmt: skip
MODELS = (*ENCODERS, *HYBRIDS)
#: The window of the attention in HybridModels.
WINDOW = 16
#: The token in place of hidden bytes, and the target where nothing is asked for.
MASK, NOT_ASKED = 256, -100
HIDDEN = 0.3
#: An epoch is `num_windows` windows of the text, each beginning anywhere.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        batch_size=32, lr=2e-3, warmup_epochs=1, channels=64, heads=4, num_layers=4,
        parameters=250_000, length=128, lengths=(512, 2048), num_windows=1024,
        num_test=65_536, minutes=10.0,
    ),
    "smoke": dict(
        batch_size=4, lr=2e-3, warmup_epochs=0.5, channels=16, heads=2, num_layers=1,
        parameters=16_000, length=16, lengths=(24, 40), num_windows=8,
        num_test=160, epochs=2, minutes=None,
    ),
}  # fmt: skip


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root="data")
    add = parser.add_argument
    add("--text", help="a file in --root; default: Python's standard library")
    add("--models", nargs="+", choices=MODELS, metavar="MODEL",
        default=["chimera", "attention-rotary"],
        help=f"of {', '.join(MODELS)}; default: chimera attention-rotary")  # fmt: skip
    add("--seeds", type=positive_int, default=1, help="of each model; default: 1")
    add("--causal", action="store_true", help="predict the next byte")
    add("--prompt", help="what --causal models go on with when they are trained")
    add("--minutes", type=positive_float,
        help="of training of each model, unless --epochs; default: 10")  # fmt: skip
    add("--length", type=positive_int, help="of the windows trained on; default: 128")

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or "default"
        return {
            "preset": preset, "optimizer": "AdamW", "weight_decay": 0.01,
            "dropout": 0.0, **PRESETS[preset],
        }  # fmt: skip

    args = parse(parser, argv, recipe)
    args.models = list(dict.fromkeys(args.models))
    if args.causal and "depths" in args.models:
        parser.error("--models depths reads later bytes: leave out --causal")
    if args.prompt is not None and not (args.causal and args.prompt):
        parser.error("--prompt is some text for --causal models")
    if args.prompt is not None and set(args.models) & set(HYBRIDS):
        parser.error(f"--prompt is for --models of {', '.join(ENCODERS)}")
    if args.prompt is not None and len(args.prompt.encode()) >= args.length:
        parser.error(f"--prompt must be shorter than --length, {args.length}")
    kind = "causal" if args.causal else "masked"
    text = Path(args.text).stem if args.text else "stdlib"
    name = "-".join([text, kind, *args.models, args.preset, f"seed{args.seed}"])
    args.out = args.out or Path("runs", "masked-lm", name)
    return args


# Data ----------------------------------------------------------------------------


def read_text(args: Namespace) -> Tensor:
    """All bytes of the text."""
    if args.text is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        raw = b"".join(path.read_bytes() for path in files)
    else:
        path = args.root / args.text
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}: pass --root and --text")
        raw = path.read_bytes()
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            raise OSError(f"{path} is not UTF-8: {error}") from None
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    least = 20 * (2 + max(args.length, *args.lengths))
    if len(text) < least:
        raise OSError(f"the text has {len(text):,} bytes, and needs {least:,}")
    return text


class Windows(Dataset):
    """Graphs of windows of a text, with bytes to predict.

    For training, windows begin anywhere and are new in each epoch. For tests, they are
    consecutive, and always hide the same bytes.
    """

    def __init__(
        self, text: Tensor, length: int, count: int, *, causal: bool, fixed: bool
    ) -> None:
        self.text, self.length, self.count = text, length, count
        self.causal, self.fixed = causal, fixed
        self.to_graph = SequenceToGraph()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Data:
        if not 0 <= i < self.count:
            raise IndexError(i)
        generator = torch.Generator().manual_seed(i) if self.fixed else None
        size = self.length + self.causal
        start = i * self.length
        if not self.fixed:
            start = int(torch.randint(len(self.text) - size + 1, ()))
        window = self.text[start : start + size]
        if self.causal:
            data = self.to_graph(window[:-1])
            data.y = window[1:].clone()
            return data
        order = torch.rand(size, generator=generator)
        hidden = (order < HIDDEN) | (order == order.min())  # at least one
        data = self.to_graph(window.masked_fill(hidden, MASK))
        data.y = window.masked_fill(~hidden, NOT_ASKED)
        return data


def get_datasets(args: Namespace, text: Tensor, lengths: list[int]) -> dict[str, Any]:
    """Nine tenths of the text for training, half of the rest each for val and test."""
    ends = [0, 9 * len(text) // 10, 19 * len(text) // 20, len(text)]
    train, val, test = (text[a:b] for a, b in pairwise(ends))

    def fixed(part: Tensor, length: int) -> Windows:
        count = max(1, min(args.num_test, len(part) - 1) // length)
        return Windows(part, length, count, causal=args.causal, fixed=True)

    windows = Windows(
        train, args.length, args.num_windows, causal=args.causal, fixed=False
    )
    tests = {f"test_{length}": fixed(test, length) for length in lengths}
    return {"train": windows, "val": fixed(val, args.length), **tests}


def get_task() -> Task:
    """Cross-entropy of the bytes asked for, and the share predicted correctly."""

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(out, batch.y, ignore_index=NOT_ASKED)

    def rows(out: Tensor, batch: Batch) -> dict[str, tuple[Tensor, ...]]:
        asked = batch.y != NOT_ASKED
        each = F.cross_entropy(out[asked], batch.y[asked], reduction="none")
        return {"cross_entropy": (each,), "accuracy": (out[asked], batch.y[asked])}

    accuracy = MulticlassAccuracy(MASK + 1, average="micro")
    return Task(
        loss, {"cross_entropy": MeanMetric(), "accuracy": accuracy}, rows, "min"
    )


# Runs ----------------------------------------------------------------------------


def build_model(
    args: Namespace, name: str, num_outputs: int | None = None
) -> GraphModel:
    """A model of the requested size, by the width of its feed-forward networks.

    With `num_outputs`, the same layers with a head for whole sequences.
    """

    def encoder(mlp_channels: int, num_outputs: int | None = None) -> GraphModel:
        position, options = ENCODERS[name].get("position"), {}
        if ENCODERS[name]["mixer"].startswith("chimera"):
            options["state_channels"] = args.channels // 2
        head = "lm" if args.causal else "mlm"
        return SequenceEncoder(
            MASK + 1,
            args.channels,
            num_outputs,
            num_layers=args.num_layers,
            mixer=ENCODERS[name]["mixer"],
            heads=args.heads,
            head=head if num_outputs is None else "classify",
            position=position,
            size=args.length if position == "learned" else None,
            dropout=args.dropout,
            mlp_channels=mlp_channels,
            mixer_kwargs=options,
        )

    def hybrid(mlp_channels: int, num_outputs: int | None = None) -> GraphModel:
        return HybridModel(
            [MASK + 1],
            args.channels,
            num_outputs or MASK + 1,
            args.num_layers,
            heads=args.heads,
            kind="sequence",
            causal=args.causal,
            attention_kwargs={"k": WINDOW, "rotary": True},
            dropout=args.dropout,
            mlp_channels=mlp_channels,
            head="node" if num_outputs is None else "graph",
            head_layers=1,
            **{"attention": "khop", **HYBRIDS[name]},
        )

    build = encoder if name in ENCODERS else hybrid
    width = match_size(build, args.parameters, range(1, 16 * args.channels))
    return build(width, num_outputs)


def write_on(args: Namespace, model: Any) -> str:
    """The continuation of the prompt by the best weights, up to a window's length."""
    load_best(args, model)
    prompt = torch.frombuffer(bytearray(args.prompt.encode()), dtype=torch.uint8)
    count = args.length - len(prompt)  # learned positions end there
    generator = torch.Generator().manual_seed(args.seed)
    tokens = model.generate(prompt.long(), count, generator=generator)
    return bytes(tokens.clamp(max=255).tolist()).decode(errors="replace")


def tabulate(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A row for each model: its results at each length, with its best weights; means
    and standard deviations (``ddof=0``) of several seeds.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(key.partition("/")[0] for key in runs):
        found = [run for key, run in runs.items() if key.partition("/")[0] == name]
        run = found[0]
        rows[name] = {"parameters": run["parameters"], "epochs": run["epochs_done"]}
        rows[name]["minutes"] = round(mean(x["seconds"] for x in found) / 60, 2)
        for key in run["best"]:
            if key.startswith("test_") and not key.endswith("_loss"):
                values, short = [x["best"][key] for x in found], key[len("test_") :]
                rows[name][short] = mean(values)
                if len(found) > 1:
                    rows[name] |= {
                        f"{short}_std": float(np.std(values)),
                        "seeds": len(found),
                    }
    return rows


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    open_run(args)  # before the text is read
    text = read_text(args)

    def train(own: Namespace) -> dict[str, Any]:
        lengths = [own.length, *own.lengths]
        if ENCODERS.get(own.model, {}).get("position") == "learned":
            lengths = [own.length]  # its table has no others
        data = get_datasets(own, text, lengths)
        seed_everything(own.seed)
        model = build_model(own, own.model)
        plan = partial(epochs_within, own.minutes, model, get_task(), own, data)
        own.epochs = planned_epochs(own, plan)
        title = f"{own.model}, {own.epochs} epochs"
        found = fit(own, model, get_task(), lambda: data, title)
        if own.prompt is not None and "best" in found and RANK == 0:
            print(write_on(own, model))
        return found

    runs = {name: {"model": name} for name in args.models}
    if args.seeds > 1:
        runs = {
            f"{name}/seed-{seed}": {"model": name, "seed": seed}
            for seed in range(args.seed, args.seed + args.seeds)
            for name in args.models
        }
    return fit_all(args, runs.items(), train, tabulate)


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
