"""Tables of graphs at fixed addresses, for steps that are captured once."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import STATIC, Recipe, remembered, roomy, table
from pyg_chimera.ops.common.checks import check_number, setting


class StaticTables:
    r"""Keeps the tables of a graph at fixed addresses, so that those of another one can
    be copied into them, and a captured CUDA graph of a step with
    :class:`~pyg_chimera.nn.ChimeraConv` computes all batches of small graphs that are
    padded to one shape. ::

        tables = ops.StaticTables(static.edge_index, static.batch)
        with tables, ops.unchecked():
            ...  # warm up, and capture, a step that reads 'static'
        for batch in loader:
            static.x.copy_(batch.x)  # and what else the step reads
            tables.update(batch.edge_index, batch.batch)
            graph.replay()

    The algorithm remains that of the captured step, whose tables have room for larger
    matrices. Supported are :func:`~pyg_chimera.ops.chimera_transition`, and
    :func:`~pyg_chimera.ops.resolvent_mix` with :obj:`backend="triton"` and
    :obj:`form="mask"`, which GPUs choose for graphs of up to some 400 nodes. The
    context applies to the thread that enters it.

    Args:
        *tensors (torch.Tensor): The index tensors that layers read in the step:
            :obj:`edge_index`, and :obj:`batch` and :obj:`rank` where layers get these.
        room (float, optional): The factor by which the entries of all matrices, the
            rows of the largest and the entries of factors may grow. It never takes a
            matrix of at most 512 rows beyond 512. (default: :obj:`1.5`)

    Raises:
        ValueError: If :obj:`room` is less than one; within the context, if the step
            reads graphs from other tensors, or needs tables that cannot be replaced.
        TypeError: If a tensor is not of integers.
    """

    def __init__(self, *tensors: Tensor, room: float = 1.5) -> None:
        for x in tensors:
            integers = isinstance(x, Tensor) and not x.dtype.is_floating_point
            if not integers or x.dtype.is_complex or x.dtype == torch.bool:
                got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"'tensors' must be tensors of integers, got '{got}'")
        check_number("room", room)
        if not room >= 1:
            raise ValueError(f"'room' must be at least 1, got {room}")
        self.tensors, self.room = tensors, room
        self._held: dict[tuple, Any] = {}

    def __enter__(self) -> "StaticTables":
        self._context = setting(STATIC, self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def structure(self, recipe: Recipe) -> Any:
        """The structure of a call within the context."""
        places = tuple(map(self._place, recipe.tensors))
        key = recipe.make, places, recipe.options
        if key not in self._held:
            self._held[key] = roomy(recipe.build(), self.room)
        return self._held[key]

    def _place(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        for place, y in enumerate(self.tensors):
            if all(f(x) == f(y) for f in (Tensor.data_ptr, Tensor.size, Tensor.stride)):
                return place
        raise ValueError(
            "'tensors' must be all index tensors that layers read ('edge_index', "
            "'batch', 'rank'), and the very tensors, but a layer reads another one of "
            f"shape {tuple(x.shape)}; layers that make graphs of their own are not "
            "supported"
        )

    def update(self, *tensors: Tensor) -> None:
        """Copies the index tensors of another graph over those of the step, and its
        tables over those that the step reads.

        Args:
            *tensors (torch.Tensor): The index tensors, of the same shapes, in the order
                of those of the step. The host reads them: pass CPU tensors.

        Raises:
            ValueError: If shapes differ, or if tables do not fit. Nothing has been
                copied then.
            TypeError: If dtypes differ.
        """
        for old, new in zip_longest(self.tensors, tensors):
            known, got = (None if x is None else tuple(x.shape) for x in (old, new))
            if known != got:
                raise ValueError(
                    f"'tensors' must have the shapes of those of the step, {known}, "
                    f"got {got}; 'pyg_chimera.transforms.PadBatch' pads batches to few "
                    "shapes, each of which needs tables, and a captured step, of its "
                    "own"
                )
            if old.dtype != new.dtype:
                raise TypeError(
                    f"'tensors' must be of the dtypes of those of the step, "
                    f"{old.dtype}, got {new.dtype}"
                )
        pairs: list[tuple[Tensor, Tensor]] = []
        held = {}
        with setting(STATIC, None):
            for (make, places, options), old in self._held.items():
                given = [x if x is None else tensors[x] for x in places]
                new = remembered(make, given, *options)
                for its, other in _tables(old, new):
                    _check_room(its, other)
                    pairs += zip(_flat(its), _flat(other), strict=True)
                if not isinstance(old, tuple):  # a structure, and not a table itself
                    kept = {x: y for x, y in old.tables.items() if _is_table(y)}
                    new = replace(new, tables={**kept, "room": self.room})
                    held[make, places, options] = new
        self._held |= held
        for old, new in (*zip(self.tensors, tensors, strict=True), *pairs):
            missing = len(old) - len(new)
            if missing > 0 and len(new) > 0:  # further blocks are empty
                new = torch.cat([new, new[-1:].expand(missing, *new.shape[1:])])
            old[: len(new)].copy_(new)


def _is_table(x: Any) -> bool:
    return hasattr(x, "with_room")


def _tables(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """What kernels read of a structure, and the same of another one."""
    if isinstance(old, tuple):
        yield old, new
        return
    for key, its in old.tables.items():
        if _is_table(its):
            make, _, *options = key
            yield its, table(make, new, torch.device("cpu"), *options)


def _flat(x: Any) -> Iterator[Tensor]:
    """The tensors of a table."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for y in x:
            yield from _flat(y)


def _check_room(old: Any, new: Any) -> None:
    """Checks that a table fits into that of a captured step."""
    known, got = ((*getattr(x, "limits", ()), *map(len, _flat(x))) for x in (old, new))
    if any(x < y for x, y in zip(known, got, strict=True)):
        raise ValueError(
            f"'tensors' must be of graphs that fit into the tables of the captured "
            f"step, which have room for {known} entries, got {got}; capture a step "
            "with this batch, or with more 'room' in 'StaticTables'"
        )
