from collections.abc import Hashable, Iterable, Sequence
from hashlib import sha1
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.transforms._to_grid import ToGrid

__all__ = ["SequenceToGraph"]


@functional_transform("chimera_sequence_to_graph")
class SequenceToGraph(ToGrid):
    r"""Converts a sequence to a path graph with a node for each entry (functional name:
    :obj:`chimera_sequence_to_graph`).

    A sequence of :math:`n` entries becomes

    * :obj:`x`: the entries, tokens :math:`[n]`, int64, or features :math:`[n, F]`,
      whose type is kept,
    * :obj:`edge_index`, int64 :math:`[2, 2 (n - 1)]`: edges between consecutive
      entries, in both directions, sorted by source, then target,
    * :obj:`pos`, float :math:`[n, 1]`: the position of the entry,
    * :obj:`height` :math:`= 1` and :obj:`width` :math:`= n`, as for a grid of one row,
      as :class:`~pyg_chimera.nn.PLSTMGridConv` needs them.

    For its two directed paths, see :class:`DAGDecomposition(method="path")
    <DAGDecomposition>`.

    Args:
        vocabulary (Sequence, optional): The tokens, a string or a sequence, in which a
            token's position is its number. Without it, entries are numbers.
            (default: :obj:`None`)
        attr_name (str, optional): The attribute of the data that holds the sequence. It
            is removed; others, such as :obj:`y`, are kept, except :obj:`edge_attr` and
            :obj:`num_nodes` of an earlier graph. (default: :obj:`"sequence"`)

    Shapes:
        - **input:** a :class:`torch_geometric.data.Data` with a sequence, or the
          sequence alone: with a vocabulary, a string or any sequence of its tokens;
          without one, a tensor, an array or a list of numbers :math:`(n)` or
          :math:`(n, F)`, or :obj:`bytes`
        - **output:** a :class:`torch_geometric.data.Data`

    Raises:
        TypeError: If the input or the vocabulary is none of these.
        ValueError: If the sequence is empty or has the wrong shape, a token is not in
            the vocabulary (the error names it and its position), or the vocabulary
            contains one twice.

    Example:
        >>> data = SequenceToGraph("abc")("cab")
        >>> data.x.tolist(), data.edge_index.tolist()
        ([2, 0, 1], [[0, 1, 1, 2], [1, 0, 2, 1]])
    """

    content = "a sequence"
    coordinates = 1

    def __init__(
        self,
        vocabulary: Sequence[Hashable] | None = None,
        attr_name: str = "sequence",
    ) -> None:
        self.number: dict[Any, int] | None = None
        if vocabulary is not None:
            if not isinstance(vocabulary, Sequence):
                raise TypeError(
                    "'vocabulary' must be a string or a sequence, got "
                    f"'{type(vocabulary).__name__}'"
                )
            self.number = {token: number for number, token in enumerate(vocabulary)}
            if len(self.number) != len(vocabulary):
                tokens = list(vocabulary)
                twice = next(t for t in tokens if tokens.count(t) > 1)
                raise ValueError(f"'vocabulary' must not have {twice!r} twice")
        self.attr_name = attr_name

    def nodes(self, content: Any) -> tuple[Tensor, int, int]:
        """The entries, as a grid of one row."""
        x = self._entries(content)
        return x, 1, x.size(0)

    def __repr__(self) -> str:
        arguments = []
        if self.number is not None:
            digest = sha1(repr(self.number).encode(), usedforsecurity=False).hexdigest()
            arguments.append(f"{len(self.number)} tokens, {digest[:8]}")
        if self.attr_name != "sequence":
            arguments.append(f"attr_name={self.attr_name!r}")
        return f"{self.__class__.__name__}({', '.join(arguments)})"

    def _entries(self, sequence: Any) -> Tensor:
        """One row for each entry of the sequence."""
        if self.number is not None:
            return torch.tensor(self._numbered(sequence))
        wanted = "The sequence must be numbers of shape [n] or [n, F], with n > 0"
        if isinstance(sequence, str):
            raise TypeError(
                f"{wanted}, got a string; give its characters as 'vocabulary', or "
                "pass 'text.encode()'"
            )
        if isinstance(sequence, (bytes, bytearray)):
            sequence = list(sequence)
        if isinstance(sequence, np.ndarray):
            sequence = np.ascontiguousarray(sequence)
        try:
            x = torch.as_tensor(sequence).detach().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{wanted}, got '{type(sequence).__name__}'") from error
        if x.dim() not in (1, 2) or x.numel() == 0 or x.is_complex():
            raise ValueError(f"{wanted}, got shape {list(x.shape)}, {x.dtype}")
        return x if x.dim() == 2 or x.is_floating_point() else x.long()

    def _numbered(self, sequence: Any) -> list[int]:
        assert self.number is not None
        if isinstance(sequence, Tensor):
            sequence = sequence.tolist()
        if not isinstance(sequence, Iterable):
            raise TypeError(
                "The sequence must be a string or a sequence of tokens, got "
                f"'{type(sequence).__name__}'"
            )
        numbers = []
        for place, token in enumerate(sequence):
            if not isinstance(token, Hashable) or token not in self.number:
                raise ValueError(
                    f"The sequence must be of tokens of the vocabulary, got {token!r} "
                    f"at place {place}, which is none of its {len(self.number)}"
                )
            numbers.append(self.number[token])
        if not numbers:
            raise ValueError("The sequence must not be empty")
        return numbers
