"""What Triton's interpreter does not show by itself: races, order, memory not owned.

It runs one program after the other, and each operation on all elements at once, so that
results are right without barriers and in spite of races; it multiplies in float32
whatever is asked for. And it scans number by number, where a GPU composes any segments
that follow on each other. What is here patches the interpreter of Triton 3.9.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

__all__ = ["counted", "rounded", "scans_by_doubling", "watched"]

_NOBODY, _SEVERAL = -1, -2


class _Shadow:
    """Who has last read and written each number of the tensors of a launch, and when.

    Within a program, time is counted in barriers: threads run apart between them.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        by_place = sorted(tensors.items(), key=lambda x: x[1].data_ptr())
        self.names = [name for name, _ in by_place]
        self.start = np.array([x.data_ptr() for _, x in by_place])
        self.item = np.array([x.element_size() for _, x in by_place])
        count = np.array([x.numel() for _, x in by_place])
        self.stop = self.start + count * self.item
        self.first = np.cumsum(count) - count
        self.reader, self.writer = np.full((2, count.sum()), _NOBODY)
        self.read, self.written = np.full((2, count.sum()), -1)
        self.program = self.time = 0
        self.problems: set[str] = set()

    def begin(self, program: int) -> None:
        self.program, self.time = program, self.time + 1

    def _places(self, pointers, mask):
        at = np.broadcast_to(pointers, np.broadcast(pointers, mask).shape)
        at = at[np.broadcast_to(mask.astype(bool), at.shape)].astype(np.int64)
        tensor = np.searchsorted(self.start, at, side="right") - 1
        outside = (tensor < 0) | (at >= self.stop[tensor])
        if outside.any():  # it would touch what is not there
            raise IndexError(f"{outside.sum()} addresses beyond {self.names}")
        offset = (at - self.start[tensor]) // self.item[tensor]
        return self.first[tensor] + offset, tensor

    def _report(self, what: str, where: np.ndarray, tensor: np.ndarray) -> None:
        names = {self.names[t] for t in tensor[where]}
        self.problems |= {f"{what} {name}" for name in names}

    def _is_other(self, program: np.ndarray) -> np.ndarray:
        return (program != _NOBODY) & (program != self.program)

    def load(self, pointers, mask) -> None:
        place, tensor = self._places(pointers, mask)
        self._report("reads another's", self._is_other(self.writer[place]), tensor)
        self._report("reads too soon", self.written[place] == self.time, tensor)
        others = self._is_other(self.reader[place])
        self.reader[place] = np.where(others, _SEVERAL, self.program)
        self.read[place] = self.time

    def store(self, pointers, mask) -> None:
        place, tensor = self._places(pointers, mask)
        self._report("writes another's", self._is_other(self.writer[place]), tensor)
        self._report("writes what is read", self._is_other(self.reader[place]), tensor)
        soon = (self.read[place] == self.time) | (self.written[place] == self.time)
        self._report("writes too soon", soon, tensor)
        twice = np.full(len(place), len(np.unique(place)) < len(place))
        self._report("writes twice", twice, tensor)
        self.writer[place], self.written[place] = self.program, self.time


@contextmanager
def watched(seed: int) -> Iterator[set[str]]:
    """Collects problems of the launches within, whose programs run in any order."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    problems: set[str] = set()
    shadows: list[_Shadow] = []
    orders: dict[tuple, np.ndarray] = {}
    run, set_index = executor.__call__, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store

    def launch(self, *args, **kwargs):
        given = dict(zip(self.arg_names, args, strict=False), **kwargs)
        for name, x in [*given.items()]:
            if isinstance(x, tuple):  # of tensors that belong together
                given |= {f"{name}[{i}]": y for i, y in enumerate(x)}
        tensors = {x: y for x, y in given.items() if isinstance(y, torch.Tensor)}
        shadows.append(_Shadow(tensors))
        try:
            return run(self, *args, **kwargs)
        finally:
            found = shadows.pop().problems
            problems.update(f"{self.fn.__name__} {x}" for x in found)

    def begin(self, x, y, z):
        shape = self.grid_dim
        if shape not in orders:
            orders[shape] = np.random.default_rng(seed).permutation(np.prod(shape))
        program = orders[shape][np.ravel_multi_index((x, y, z), shape)]
        set_index(self, *map(int, np.unravel_index(program, shape)))
        shadows[-1].begin(program)

    def watched_load(self, pointers, mask, *args):
        shadows[-1].load(pointers.data, mask.data)
        return load(self, pointers, mask, *args)

    def watched_store(self, pointers, value, mask, *args):
        shadows[-1].store(pointers.data, mask.data)
        return store(self, pointers, value, mask, *args)

    def barrier(self, *args):
        shadows[-1].time += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", launch)
        patch.setattr(builder, "set_grid_idx", begin)
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(builder, "create_barrier", barrier)
        yield problems


@contextmanager
def rounded() -> Iterator[None]:
    """Rounds what `tl.dot` multiplies to tf32, or three of them, as a GPU does."""
    plain = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, d, precision, *args):
        kind = str(precision).rsplit(".")[-1].lower()
        if a.data.dtype != np.float32 or kind == "ieee":
            return plain(self, a, b, d, precision, *args)
        x, y = _tf32(a.data), _tf32(b.data)
        out = np.matmul(x, y) + d.data
        if kind == "tf32x3":
            rest = np.matmul(_tf32(a.data - x), y) + np.matmul(x, _tf32(b.data - y))
            out = out + rest
        return interpreter.TensorHandle(out.astype(np.float32), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


@contextmanager
def scans_by_doubling() -> Iterator[None]:
    """Scans by segments of 1, 2, 4, ... numbers: as a GPU might, and much faster."""

    def scan(self, inputs):
        now, axis = list(inputs), self.axis
        place, step = np.arange(now[0].handle.data.shape[axis]), 1
        while step < len(place):
            before = [
                self.to_tensor(np.take(x.handle.data, place - step, axis), x.dtype)
                for x in now
            ]
            new = self.combine_fn.fn(*before, *now)
            new = new if isinstance(new, tuple) else (new,)
            for x, y in zip(now, new, strict=True):  # the first ones have none before
                head = np.take(x.handle.data, range(step), axis)
                rest = np.take(y.handle.data, place[step:], axis)
                y.handle.data = np.concatenate([head, rest], axis)
            now, step = list(new), 2 * step
        return now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.ScanOps, "generic_scan", scan)
        yield


def _tf32(x: np.ndarray) -> np.ndarray:
    """10 bits of mantissa, ties away from zero, as `cvt.rna.tf32` rounds."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the launches within, kernel by kernel."""
    launches: Counter[str] = Counter()
    run = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        launches[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield launches
