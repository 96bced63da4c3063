"""The operands of a scan, with one row for each state."""

from typing import Any

from torch import Tensor


class Rows:
    """The query of the node that reads each state, times the mark, and the key and
    value of the node that writes it, the key times the source.

    Args:
        inputs: The query, key and value of the nodes are first.
        ends: The writers and readers of the S states; None if states are nodes.
        source: [S, heads].
        mark: [S, heads], or None for ones.
    """

    def __init__(
        self,
        inputs: Any,
        ends: tuple[Tensor, Tensor] | None,
        source: Tensor,
        mark: Tensor | None = None,
    ) -> None:
        query, key, self.value = inputs[:3]
        self.groups, self.ends, self.source, self.mark = (
            query.size(1),
            ends,
            source,
            mark,
        )
        self.operands = query, key, self.value
        if ends is not None:
            writer, reader = ends
            repeats = self.value.size(1) // self.groups
            query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
            self.query, self.key = query[reader], key[writer]
            query, key = _scaled(self.query, mark), _scaled(self.key, source)
            self.operands = query, key, self.value[writer]

    def of_nodes(self, grad: Tensor) -> Tensor:
        """The gradient of the output [V, heads, P], at each state's reader."""
        return grad if self.ends is None else grad[self.ends[1]]

    def to_nodes(self, out: Tensor) -> Tensor:
        """The output [V, heads, P]: the sum over the states that each node reads."""
        return out if self.ends is None else self._summed(out, self.ends[1])

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        """Gradients of query, key, value, source and mark, from those of the rows."""
        unused = dq.new_empty(0)
        if self.ends is None:
            return dq, dk, dv, unused, unused
        writer, reader = self.ends
        ds = (dk * self.key).sum(-1)
        dm = unused if self.mark is None else (dq * self.query).sum(-1)
        dq = self._summed(_scaled(dq, self.mark), reader)
        dk = self._summed(_scaled(dk, self.source), writer)
        dq, dk = (x.unflatten(1, (self.groups, -1)).sum(2) for x in (dq, dk))
        return dq, dk, self._summed(dv, writer), ds, dm

    def _summed(self, x: Tensor, node: Tensor) -> Tensor:
        out = x.new_zeros(self.value.size(0), *x.shape[1:])
        return out.index_add_(0, node, x)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else factor.unsqueeze(-1) * x
