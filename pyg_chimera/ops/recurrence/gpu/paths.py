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
from pyg_chimera.ops.recurrence.gpu.rows import Rows
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
        ends = (x[states.state] for x in (states.writer, states.reader))
        arrays = (states.state, scans.entry, *ends)
        return cls(
            Chunks.of(states.ptr, position, later, device),
            *(torch.from_numpy(x).to(device) for x in arrays),
        )


def _rows(call: Call, pivots: Pivots) -> tuple[_Tables, Rows, Tensor]:
    """The tables, and the operands and weights of the scans."""
    value = call.inputs.value
    tables = table(_Tables.of, call.structure, value.device)
    weight, source = (x.to(value.dtype) for x in gates(pivots))
    rows = Rows(call.inputs, (tables.writer, tables.reader), source[tables.state])
    return tables, rows, weight[tables.entry]


def forward(call: Call, pivots: Pivots) -> tuple[Tensor, Tensor]:
    """The output [V, heads, P], and the states after each chunk."""
    tables, rows, weight = _rows(call, pivots)
    out, states = chunk_kernels.scan(tables.chunks, *rows.operands, weight)
    return rows.to_nodes(out), states


def backward(
    call: Call, pivots: Pivots, states: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and edge weight."""
    tables, rows, weight = _rows(call, pivots)
    *found, dw = chunk_kernels.scan_gradients(
        tables.chunks, *rows.operands, weight, states, rows.of_nodes(grad)
    )
    *grads, ds, _ = rows.gradients(*found)
    zeros = torch.zeros_like(pivots.d).repeat(2, 1)
    d_weight = zeros.index_copy(0, tables.entry, dw.double())
    d_source = zeros.index_copy(0, tables.state, ds.double())
    places = table(Places.of, call.structure, grad.device)
    d_edges = gradients(places, pivots, d_weight, d_source)
    return *grads, d_edges.to(grad.dtype)
