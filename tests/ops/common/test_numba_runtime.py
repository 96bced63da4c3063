import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyg_chimera.nn import GatedGCNConv, GPSLayer
from pyg_chimera.ops.common import numba_runtime
from pyg_chimera.ops.common.numba_runtime import jit, run, stopped

SMALLEST = 5e-324
COSTS = {"short": 1.0, "threads": 1e4, "long": 1e8}


@pytest.fixture(autouse=True)
def _two_threads():
    torch.set_num_threads(2)  # put back by a fixture for all operators' tests


@jit
def adds(first, last, stop, scratch, done, amount):
    scratch[:] = amount  # each thread has its own
    for i in range(first, last):
        if stopped(stop):
            return
        done[i] += scratch[i % 7]


@jit
def multiplies(first, last, stop, scratch, x):
    for i in range(first, last):
        x[i] *= 0.5


@jit
def divides(first, last, stop, scratch, done, by):
    for i in range(first, last):
        if stopped(stop):
            return
        done[i] = 1 // by


@jit
def waits(first, last, stop, scratch, x):
    for i in range(first, last):
        for _ in range(1000):
            if stopped(stop):
                return
            for _ in range(1000):
                x[i] += 1.0


@jit
def slowly_adds(first, last, stop, scratch, done, amount):
    scratch[:] = amount
    for i in range(first, last):
        for k in range(1_000_000):
            done[i] += scratch[k % 7]


@jit
def returns(first, last, stop, scratch):
    return last


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", COSTS)
def test_each_task_runs_once(kind, threads):
    torch.set_num_threads(threads)
    costs = np.random.default_rng(0).random(100) * COSTS[kind]
    for dtype in (np.float32, np.float64):
        done = np.zeros(100)
        run(adds, costs, 7, np.dtype(dtype), done, 3)
        run(adds, costs[:0], 7, np.dtype(dtype), done[:0], 3)
        assert (done == 3).all()


@pytest.mark.parametrize("kind", COSTS)
def test_errors_are_raised_and_stop_the_rest(kind):
    done = np.full(10_000, -1)
    costs = np.full(10_000, COSTS[kind] / 100)
    with pytest.raises(RuntimeError, match="divides failed"):
        run(divides, costs, 0, np.dtype(np.float32), done, 0)
    assert (done == -1).all()
    run(divides, costs, 0, np.dtype(np.float32), done, 1)
    assert (done == 1).all()


@pytest.mark.parametrize("kind", COSTS)
def test_denormals_are_zero_in_kernels_only(kind):
    for dtype in (np.float32, np.float64):
        x = np.full(100, np.finfo(dtype).tiny, dtype)
        run(multiplies, np.full(100, COSTS[kind]), 0, np.dtype(dtype), x)
        assert (x == 0).all()
    assert SMALLEST * 1.0 > 0


@pytest.mark.parametrize("without", ["OPENMP", "_PID"])
def test_python_threads_without_openmp_and_after_a_fork(without, monkeypatch):
    monkeypatch.setattr(numba_runtime, without, None)
    in_threads, calls = numba_runtime._in_threads, []
    monkeypatch.setattr(
        numba_runtime, "_in_threads", lambda *args: calls.append(in_threads(*args))
    )
    done = np.zeros(100)
    run(adds, np.full(100, 1e4), 7, np.dtype(np.float32), done, 3)
    assert (done == 3).all()
    assert len(calls) == 1


def test_long_work_has_memory_of_its_own():
    """A signal handler may run kernels while threads of Python are at work."""
    done = np.zeros(100)

    def handler(*_: object) -> None:
        run(adds, np.full(100, 1.0), 7, np.dtype(np.float64), np.zeros(100), 5)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        run(slowly_adds, np.full(100, 1e8), 7, np.dtype(np.float64), done, 3)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (done == 3e6).all()


def test_kernels_return_nothing():
    with pytest.raises(TypeError, match="returns must return nothing"):
        run(returns, np.ones(1), 0, np.dtype(np.float32))


def test_a_kernel_that_is_not_jitted():
    """With NUMBA_DISABLE_JIT."""
    done = np.zeros(100)
    run(adds.py_func, np.full(100, 1e4), 7, np.dtype(np.float32), done, 3)
    assert (done == 3).all()


@pytest.mark.parametrize("kind", ["threads", "long"])
def test_ctrl_c_is_never_swallowed(kind):
    """However often it comes, and wherever."""

    def forever():
        while True:
            run(waits, costs, 0, np.dtype(np.float32), x)

    costs, x = np.full(100, COSTS[kind]), np.zeros(100)
    run(waits, costs, 0, np.dtype(np.float32), x)
    assert (x == 1e6).all()
    for delay in np.linspace(0.005, 0.03, 12):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            forever()
        assert time.monotonic() - begin < 2
        timer.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPTED = """
import os, signal, threading, time
import torch
from pyg_chimera.ops import resolvent_mix

edges = torch.randint(0, 2500, (2, 50_000), generator=torch.Generator().manual_seed(0))
query, value, weight = torch.ones(2500, 1, 64), torch.ones(2500, 2, 32), torch.full(
    (50_000, 2), 0.01)
resolvent_mix(query[:9], query[:9], value[:9], edges[:, :0], weight[:0], form="mask")
sent = []
def interrupt():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(6, interrupt).start()  # far from the end of the factorisation
try:
    resolvent_mix(query, query, value, edges, weight, solver="sparse", form="mask")
except KeyboardInterrupt:
    print(time.monotonic() - sent[0])
"""


@pytest.mark.slow
def test_ctrl_c_in_one_long_task():
    out = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=True
    )
    assert float(out.stdout) < 2


def test_compilation_is_said_once(caplog):
    announcer = numba_runtime._Announcer()

    class Event:
        def __init__(self, function):
            self.data = {"dispatcher": type("", (), {"py_func": function})}

    with caplog.at_level(logging.WARNING, logger="pyg_chimera"):
        announcer.on_start(Event(test_compilation_is_said_once))  # not one of ours
        assert not caplog.records
        assert not gc.isenabled()
        for _ in range(2):
            announcer.on_start(Event(run))
            announcer.on_end(Event(run))
            assert not gc.isenabled()  # the first one still compiles
        announcer.on_end(Event(test_compilation_is_said_once))
    assert gc.isenabled()
    assert len(caplog.records) == 1
    assert "compiling" in caplog.text
    assert "python -m pyg_chimera.compile" in caplog.text


def test_garbage_is_not_collected_after_compilation_if_it_was_not_before():
    announcer = numba_runtime._Announcer()
    event = SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=run)})
    announcer.said = True
    gc.disable()
    try:
        announcer.on_start(event)
        announcer.on_end(event)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_who_waits_for_a_compiler_is_said_once(caplog):
    """The innermost layer, or what is known of kernels that another thread calls."""
    function = SimpleNamespace(__module__="pyg_chimera.ops.grid_conv.numba_backend")
    event = SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=function)})
    announcer = numba_runtime._Announcer()

    def compiling(x):
        announcer.on_start(event)
        announcer.on_end(event)
        return x

    conv = GatedGCNConv(4, 4, edge_dim=0, act=compiling)
    layer, edges = GPSLayer(4, conv), torch.tensor([[0], [1]])
    for _ in range(2):
        layer(torch.randn(2, 4), edges)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pyg_chimera", "WARNING")
    assert "kernels of GatedGCNConv. Each layer type takes" in record.getMessage()
    announcer.said = False
    compiling(0)
    assert "kernels of pyg_chimera.ops.grid_conv." in caplog.records[-1].getMessage()
