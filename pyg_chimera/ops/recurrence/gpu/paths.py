"""The resolvent of paths on a GPU: two scans in chunks, as in `cpu.paths`."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.gpu import chunks as chunk_kernels
from pyg_chimera.ops.recurrence.gpu.chunks import Chunks
from pyg_chimera.ops.recurrence.gpu.path_pivots import Places, gates, gradients
from pyg_chimera.ops.recurrence.plan.paths import Pivots, required_path_scans
from pyg_chimera.ops.structure.symbolic_factor import Blocks


class _Tables(NamedTuple):
    """Tables that depend on the graph only, on a device: S states, L entries.

    States are in the order of the scans.
    """

    chunks: Chunks
    state: Tensor  #: [S] index of each state's source in the `gates`
    entry: Tensor  #: [L] index of each entry's weight in the `gates`
    writer: Tensor  #: [S] the node that writes each state
    reader: Tensor  #: [S] the node that reads it

    @classmethod
    def of(cls, symbolic: Blocks, device: torch.device) -> "_Tables":
        scans = required_path_scans(symbolic)
        states, position = scans.states, np.arange(len(scans.states.state))
        later = np.setdiff1d(position, states.ptr[:-1])  # positions with an entry
        arrays = (
            states.state, scans.entry, states.writer[states.state],
            states.reader[states.state],
        )  # fmt: skip
        return cls(
            Chunks.of(states.ptr, position, later, device),
            *(torch.from_numpy(x).to(device) for x in arrays),
        )


class _Rows:
    """The inputs of the scans, one row per state."""

    def __init__(self, call: Call, pivots: Pivots) -> None:
        query, key, value = call.inputs[:3]
        self.tables = tables = table(_Tables.of, call.structure, value.device)
        self.groups, self.nodes = query.size(1), value.size(0)
        repeats = value.size(1) // self.groups
        query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
        weight, source = (x.to(value.dtype) for x in gates(pivots))
        self.source = source[tables.state].unsqueeze(-1)
        self.key = key[tables.writer]
        self.operands = (
            query[tables.reader],
            self.source * self.key,
            value[tables.writer],
            weight[tables.entry],
        )

    def summed(self, x: Tensor, node: Tensor) -> Tensor:
        """The sums over the rows of each node."""
        return x.new_zeros(self.nodes, *x.shape[1:]).index_add_(0, node, x)


def forward(call: Call, pivots: Pivots) -> tuple[Tensor, Tensor]:
    """The output [V, heads, P], and the states after each chunk."""
    rows = _Rows(call, pivots)
    out, states = chunk_kernels.scan(rows.tables.chunks, *rows.operands)
    return rows.summed(out, rows.tables.reader), states


def backward(
    call: Call, pivots: Pivots, states: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and edge weight."""
    rows = _Rows(call, pivots)
    tables, value = rows.tables, call.inputs.value
    dq, dk, dv, dw = chunk_kernels.scan_gradients(
        tables.chunks, *rows.operands, states, grad[tables.reader]
    )
    zeros = torch.zeros_like(pivots.d).repeat(2, 1)
    ds = (dk * rows.key).sum(-1).double()
    d_weight = zeros.index_copy(0, tables.entry, dw.double())
    d_source = zeros.index_copy(0, tables.state, ds)
    places = table(Places.of, call.structure, value.device)
    d_edges = gradients(places, pivots, d_weight, d_source)
    dq = rows.summed(dq, tables.reader)
    dk = rows.summed(rows.source * dk, tables.writer)
    dq, dk = (x.unflatten(1, (rows.groups, -1)).sum(2) for x in (dq, dk))
    return dq, dk, rows.summed(dv, tables.writer), d_edges.to(value.dtype)
