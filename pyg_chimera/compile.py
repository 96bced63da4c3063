"""Compiles the CPU kernels ahead of their first call, in parallel processes.

``python -m pyg_chimera.compile`` calls every operator, layer and transform on tiny
graphs, forward and backward. What numba compiles stays on disk, where later processes
find it; so an interrupted run goes on where it stopped.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import zip_longest
from multiprocessing import active_children, get_context
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_chimera import nn, transforms
from pyg_chimera.ops.common.compilation import PROBLEMS
from pyg_chimera.ops.common.examples import Draw
from pyg_chimera.ops.common.numba_runtime import ANNOUNCER
from pyg_chimera.ops.common.operator import OPERATORS
from pyg_chimera.ops.common.verdicts import algorithm, all_options, cast, computed

__all__ = ["main"]


class Call(NamedTuple):
    """What is called: an operator, a layer or a transform, and its options."""

    name: str
    options: dict[str, Any]
    graph: str = "graph"  #: the kind of graph, for layers and transforms


_LAYERS = (
    # Sums of rows so near to one that it is computed how well-conditioned I - A is.
    Call("ChimeraConv", {"heads": 2, "edge_dim": 3, "reach": (1e5, 1e5)}),
    Call("GraphMambaConv", {"order": "pagerank", "bidirectional": True}),
    Call("ChimeraDAGConv", {"heads": 2, "edge_dim": 3}, "dag"),
    Call("ChimeraPathConv", {"heads": 2, "edge_dim": 3}, "undirected path"),
    Call("GatedDeltaConv", {"heads": 2, "edge_dim": 3}),
    Call("GatedDeltaConv", {"heads": 2, "acyclic": True}, "dag"),
    Call("RGLRUConv", {"heads": 2}, "dag"),
    Call("RGLRUConv", {"heads": 2, "edge_dim": 3}, "dag"),
    Call("KHopAttentionConv", {"heads": 2, "k": 2, "rotary": True}, "dag"),
    Call("PLSTMConv", {"heads": 2, "mode": "D", "edge_dim": 3}, "dag"),
    Call("PLSTMConv", {"heads": 2, "order": "bfs", "normalization": "row"}),
    Call("PLSTMConv", {"heads": 2, "order": "degree"}),
    Call("ChimeraGridConv", {"heads": 2}, "grid"),
    Call("PLSTMGridConv", {"heads": 2}, "grid"),
)
_TRANSFORMS = (
    Call("AddDiameter", {}),
    Call("AddEliminationOrder", {}),
    Call("AddKHopIndex", {"k": 2}),
    Call("AddTopologicalOrder", {}, "dag"),
    Call("DAGDecomposition", {}),
    Call("DirectedLineGraph", {}, "dag"),
    Call("MultitreePruning", {}, "dag"),
    *(Call("NodeOrder", {"order": x}) for x in ("bfs", "degree", "pagerank")),
)


def _calls(float64: bool) -> list[tuple[Call, torch.dtype]]:
    """Calls interleaved by operator, so that workers compile different kernels."""
    families = [
        [
            Call(name, options)
            for options in all_options(operator)
            if options["backend"] == "numba"
        ]
        for name, operator in OPERATORS.items()
    ]
    turns = zip_longest(*families, _LAYERS, _TRANSFORMS)
    calls = [call for turn in turns for call in turn if call is not None]
    # Where rounding errors would grow, the resolvent takes float64 for float32.
    double = [call for call in calls if float64 or call.name == "resolvent_mix"]
    return [
        *((call, torch.float32) for call in calls),
        *((call, torch.float64) for call in double),
    ]


def _run(call: Call, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Makes a call; returns how many kernels were compiled for it, and what went wrong
    with the cache.
    """
    before = ANNOUNCER.count
    if call.name in OPERATORS:
        operator = OPERATORS[call.name]
        for inputs in operator.examples(Draw()):
            given = cast(inputs, dtype, "cpu")
            if algorithm(operator, given, call.options) is not None:
                computed(operator, given, call.options)
    elif hasattr(nn, call.name):
        _run_layer(call, dtype)
    else:
        graph = Draw().graph(call.graph)
        nodes = len(graph["batch"])
        data = Data(edge_index=graph["edge_index"], num_nodes=nodes)
        getattr(transforms, call.name)(**call.options)(data)
    return ANNOUNCER.count - before, PROBLEMS[:1]


def _run_layer(call: Call, dtype: torch.dtype) -> None:
    layer = getattr(nn, call.name)(8, **call.options).to(dtype)
    draw = Draw()
    if call.graph == "grid":
        x = draw(35, 8).to(dtype).requires_grad_()
        sizes = torch.tensor([5]), torch.tensor([7])
        layer(x, height=sizes[0], width=sizes[1]).sum().backward()
        return
    graph = draw.graph(call.graph)
    edge_index, batch = graph["edge_index"], graph["batch"]
    if call.name == "ChimeraPathConv":  # takes no self-loops
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    x = draw(len(batch), 8).to(dtype).requires_grad_()
    attr = None
    if "edge_dim" in call.options:
        attr = draw(edge_index.size(1), call.options["edge_dim"]).to(dtype)
    layer(x, edge_index, attr, batch).sum().backward()


# ------------------------------------------------------------------------- the command


def _begin() -> None:
    """In each process: Ctrl-C is for the first one, and so are messages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("pyg_chimera").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*NUMBA_CACHE_DIR")
    torch.set_num_threads(1)


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defers Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(
        handler
    ):
        yield
        return
    received: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *args: received.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(*received[0])


def _block_interrupts(block: bool) -> None:
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        how = signal.SIG_BLOCK if block else signal.SIG_UNBLOCK
        signal.pthread_sigmask(how, {signal.SIGINT})


def _compiled(
    calls: list[tuple[Call, torch.dtype]], workers: int
) -> Iterator[tuple[int, list[str]]]:
    """What `_run` returns, as calls become ready."""
    # Not forked: threads of PyTorch and numba may hold locks.
    others = active_children()
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin) as pool:
        try:
            with _deferred_interrupt():  # until the processes have begun
                _block_interrupts(True)  # in this thread, and they inherit it
                try:
                    futures = [pool.submit(_run, *call) for call in calls]
                finally:
                    _block_interrupts(False)
            for done in as_completed(futures):
                yield done.result()
        except BaseException:  # of a kernel, or Ctrl-C
            for process in active_children():
                if process not in others:
                    process.terminate()  # what is on disk is whole
            pool.shutdown(cancel_futures=True)
            raise


def main(args: Sequence[str] | None = None) -> int:
    """Compiles the kernels.

    Returns:
        int: 0, or 1 if they cannot be kept on disk, or 130 if it was interrupted.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    parser = argparse.ArgumentParser(
        "python -m pyg_chimera.compile", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--float64", action="store_true", help="for float64, too")
    parser.add_argument(
        "--workers",
        type=int,
        default=cores or os.cpu_count() or 1,
        help="the number of processes (default: the number of cores)",
    )
    given = parser.parse_args(args)
    if given.workers < 1:
        parser.error(f"argument --workers: expected at least 1, got {given.workers}")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        parser.error("NUMBA_DISABLE_JIT is set: unset it, as nothing is compiled")
    if PROBLEMS:  # of which a warning has told
        print("Nothing is compiled, as it would not be kept.", file=sys.stderr)
        return 1
    calls = _calls(given.float64)
    start, kernels, problems = perf_counter(), 0, []
    try:
        found = _compiled(calls, given.workers)
        for count, wrong in tqdm(
            found, "Compiling CPU kernels", len(calls), unit=" calls"
        ):
            kernels += count
            problems += wrong
    except KeyboardInterrupt:
        print("Interrupted; the next run goes on from here.", file=sys.stderr)
        return 130
    print(f"{kernels} functions compiled in {perf_counter() - start:.0f} s.")
    if problems:
        print(f"Not all of them are kept on disk: {problems[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
