r"""The pivots of `cpu.paths`, for all nodes at once, on any device.

The pivot :math:`p_i = d_i - w_i u_i / p_{i-1}` is the ratio of two numbers to which

.. math::
    \begin{pmatrix} d_i & -w_i u_i \\ 1 & 0 \end{pmatrix}

is applied at each node. Products of these matrices along a path are computed by
doubling, in float64, and rescaled, so they neither overflow nor underflow. The
gradients of pivots are linear recurrences along the path, also computed by doubling.
Both directions are computed at once, as rows of one sequence: the places in their
order, then from the last to the first.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.sequences import linear_recurrence
from pyg_chimera.ops.recurrence.plan.paths import Pivots, required_path_scans
from pyg_chimera.ops.structure.symbolic_factor import Blocks


class Places(NamedTuple):
    """The paths of a graph, whose V nodes have places path by path, on a device."""

    path: Tensor  #: [V] the path of each place
    before: Tensor  #: [2 V] number of rows of its path before each row
    slot: Tensor  #: [E] index of each edge in [d | w | u]
    longest: int  #: nodes of the longest path
    num_paths: int

    @classmethod
    def of(cls, symbolic: Blocks, device: torch.device) -> "Places":
        """The places of a graph whose components are paths."""
        scans = required_path_scans(symbolic)
        length = np.diff(scans.ptr)
        place = np.arange(scans.ptr[-1])
        path = np.repeat(np.arange(len(length)), length)
        before = place - scans.ptr[path]
        after = scans.ptr[1:][path] - 1 - place
        rows = np.concatenate([before, after[::-1]])
        arrays = (path, rows, scans.slot)
        moved = [torch.from_numpy(x).to(device) for x in arrays]
        sizes = int(length.max(initial=0)), len(length)
        return cls(*moved, *sizes)  # type: ignore[call-arg, arg-type]


def eliminate(places: Places, weight: Tensor) -> tuple[Pivots, Tensor]:
    """Eliminates I - A from both ends of each path, without pivoting.

    Takes weights [E, heads]. Returns the pivots and their growth: the largest row sum
    of |L| |U| over that of |I - A| on a path; infinite if a pivot is unusable.
    """
    num_nodes, heads = len(places.path), weight.size(1)
    values = weight.new_zeros(3 * num_nodes, heads, dtype=torch.double)
    values.index_add_(0, places.slot, weight.double())
    d, w, u = values.chunk(3)
    d = 1 - d
    found = _pivots(
        _rows(d, d), _rows(w * u, _next(w * u)), places.before, places.longest
    )
    pivots = Pivots(d, w, u, *_directions(found))
    return pivots, _growth(places, pivots)


def _rows(there: Tensor, back: Tensor) -> Tensor:
    """The rows of both directions, [2 V, heads]."""
    return torch.cat([there, back.flip(0)])


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Apart again, and in the order of places."""
    there, back = rows.chunk(2)
    return there, back.flip(0)


def _pivots(d: Tensor, wu: Tensor, place: Tensor, longest: int) -> Tensor:
    """p[i] = d[i] - wu[i] / p[i - 1], from the first columns of matrix products."""
    M = torch.stack([d, -wu, torch.ones_like(d), torch.zeros_like(d)], -1)
    M, step = M.unflatten(-1, (2, 2)), 1
    while step < longest:
        inside = (place[step:] >= step).view(-1, 1, 1, 1)
        longer = M[step:] @ M[:-step]
        longer = longer / longer.abs().amax((-2, -1), keepdim=True)
        M = torch.cat([M[:step], torch.where(inside, longer, M[step:])])
        step *= 2
    return M[..., 0, 0] / M[..., 1, 0]


def _next(x: Tensor) -> Tensor:
    """The value at the next place; zero after the last one."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])])


def _last(x: Tensor) -> Tensor:
    """The value at the previous place; zero before the first one."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def _growth(places: Places, pivots: Pivots) -> Tensor:
    d, w, u, there, back = (x.abs() for x in pivots)
    norm = d + w + _next(u)
    rows = [
        w + w / _last(there).where(w > 0, 1) * u + there + _next(u),
        _next(u) + _next(u) / _next(back).where(_next(u) > 0, 1) * _next(w) + back + w,
    ]
    usable = (there * back * (pivots.there + pivots.back - pivots.d)).ne(0)
    grown = torch.stack(rows).amax(0).where(usable, torch.inf)
    grown = grown.nan_to_num(torch.inf, torch.inf)
    path = places.path.unsqueeze(-1).expand_as(norm)
    zeros = norm.new_zeros(places.num_paths, norm.size(1))
    most, least = (zeros.scatter_reduce(0, path, x, "amax") for x in (grown, norm))
    return (most / least.clamp(min=1e-300)).amax() if len(zeros) else norm.new_ones(())


def _gate(pivots: Pivots) -> Tensor:
    return 1 / (pivots.there + pivots.back - pivots.d)


def gates(pivots: Pivots) -> tuple[Tensor, Tensor]:
    """[a | b] and [g | b_i g_{i+1}], [2 V, heads]; b is zero at last nodes."""
    _, w, u, there, back = pivots
    g, b = _gate(pivots), _next(u) / there
    return torch.cat([w / back, b]), torch.cat([g, b * _next(g)])


def gradients(
    places: Places, pivots: Pivots, d_weight: Tensor, d_source: Tensor
) -> Tensor:
    """From the gradients of `gates` to those of the edges' weights, [E, heads]."""
    d, w, u, there, back = pivots
    g, a, b = _gate(pivots), w / back, _next(u) / there
    n = len(d)
    dg = d_source[:n] + _last(b * d_source[n:])
    db = (d_weight[n:] + d_source[n:] * _next(g)) / there
    da = d_weight[:n] / back
    pivot = -dg * g * g
    # Both pivots: the gradients of their uses, accumulated along the path.
    factors = _rows(w * u / back.square(), _next(w * u) / there.square())
    uses = _rows(pivot - da * a, pivot - db * b)
    d_back, d_there = _directions(
        linear_recurrence(factors, uses, places.before, places.longest)
    )
    is_first = (places.before[:n] == 0).unsqueeze(-1)
    x, y = d_there / _last(there).masked_fill(is_first, 1), _last(d_back) / back
    on = pivot - d_there - d_back
    below = da - (x + y) * u
    above = _last(db) - (x + y) * w
    return torch.cat([on, below, above])[places.slot]
