import math

import torch
from torch import Tensor
from torch_geometric.nn import MLP
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import reset
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import check_inputs
from pyg_chimera.nn._norm import Norm
from pyg_chimera.nn._rotary import rotary_angles
from pyg_chimera.ops.common.checks import check_float, check_integer, readable

__all__ = ["LaplacianEncoder", "PositionEmbedding", "RandomWalkEncoder"]


class LaplacianEncoder(torch.nn.Module):
    r"""Encodes the positions of nodes in their graph, from eigenvectors of its
    Laplacian, as a set of frequencies. This is the encoder of the `"Recipe for a
    General, Powerful, Scalable Graph Transformer" <https://arxiv.org/abs/2205.12454>`_
    paper, in the form without attention.

    .. math::
        \mathbf{p}_i = \sum_{f=1}^k \textrm{mlp} \big( [ \phi_{f,i}, \lambda_f ]
        \big)

    with the eigenvectors :math:`\phi_f` of the eigenvalues :math:`\lambda_f`, which
    :class:`~pyg_chimera.transforms.LaplacianEncoding` computes. The network
    has two layers, each with a ReLU, and :obj:`2 * out_channels` hidden channels.

    The sign of an eigenvector is arbitrary. In training, each sign is flipped at
    random, in the same way for all graphs of a batch, so that models learn not to
    depend on it.

    A graph may have fewer than :math:`k` eigenvectors. Pairs of two zeros stand for
    missing ones and add nothing.

    Args:
        out_channels (int): Size of each output sample.

    Shapes:
        - **input:** pairs :math:`(|\mathcal{V}|, k, 2)` of a node's entry of an
          eigenvector and its eigenvalue, floating point
        - **output:** encodings :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If there are no channels; in the forward method, if the input has
            the wrong shape.
    """

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.out_channels = check_integer("out_channels", out_channels, 1)
        channels = [2, 2 * out_channels, out_channels]
        self.mlp = MLP(channels, norm=None, plain_last=False)

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        reset(self.mlp)

    def forward(self, pe: Tensor) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            pe (torch.Tensor): The pairs of eigenvector entries and eigenvalues.
        """
        check_float("pe", pe)
        if pe.dim() != 3 or pe.size(2) != 2:
            raise ValueError(
                "'pe' must have shape [num_nodes, k, 2], got "
                f"{list(pe.shape)}. Add it with the transform 'LaplacianEncoding'."
            )
        known = (pe != 0).any(dim=-1, keepdim=True)
        if self.training:
            flip = torch.rand(pe.size(1), device=pe.device) < 0.5
            entry, value = pe.unbind(dim=-1)
            pe = torch.stack([torch.where(flip, -entry, entry), value], dim=-1)
        return (self.mlp(pe) * known).sum(dim=1)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.out_channels})"


class RandomWalkEncoder(torch.nn.Module):
    r"""Encodes the structure around each node, from the probabilities that random walks
    return to it, as in the `"Recipe for a General, Powerful, Scalable Graph
    Transformer" <https://arxiv.org/abs/2205.12454>`_ paper.

    .. math::
        \mathbf{p}_i = \mathbf{W} \, \textrm{bn} \big( [ (\mathbf{D}^{-1}
        \mathbf{A})_{ii}, \ldots, (\mathbf{D}^{-1} \mathbf{A})^k_{ii} ] \big) +
        \mathbf{b}

    with batch normalization :math:`\textrm{bn}`. The probabilities are computed by
    :class:`torch_geometric.transforms.AddRandomWalkPE`.

    Args:
        walk_length (int): The number of steps :math:`k` of the longest walk.
        out_channels (int): Size of each output sample.

    Shapes:
        - **input:** probabilities :math:`(|\mathcal{V}|, k)`, floating point
        - **output:** encodings :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If a size is not positive; in the forward method, if the input has
            the wrong shape.
    """

    def __init__(self, walk_length: int, out_channels: int) -> None:
        super().__init__()
        self.walk_length = walk_length = check_integer("walk_length", walk_length, 1)
        self.out_channels = check_integer("out_channels", out_channels, 1)
        self.norm = Norm("batch_norm", walk_length)
        self.lin = Linear(walk_length, out_channels)

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        reset(self.norm)
        reset(self.lin)

    def forward(self, pe: Tensor, pad_node_mask: Tensor | None = None) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            pe (torch.Tensor): The probabilities of return, one column per step.
            pad_node_mask (torch.Tensor, optional): The nodes that are no padding, bool,
                see :class:`~pyg_chimera.transforms.PadBatch`. Batch normalization
                leaves the others out. (default: :obj:`None`)
        """
        check_float("pe", pe)
        if pe.dim() != 2 or pe.size(1) != self.walk_length:
            raise ValueError(
                f"'pe' must have shape [num_nodes, {self.walk_length}], got "
                f"{list(pe.shape)}. Add it with the transform "
                f"'AddRandomWalkPE(walk_length={self.walk_length})'."
            )
        return self.lin(self.norm(pe, mask=pad_node_mask))

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.walk_length}, {self.out_channels})"


class PositionEmbedding(torch.nn.Module):
    r"""Adds to each node an embedding of its position, as the first layer of a model.

    Learned embeddings are a table of positions, as in a `Vision Transformer
    <https://arxiv.org/abs/2010.11929>`_. Sinusoidal ones are those of `"Attention Is
    All You Need" <https://arxiv.org/abs/1706.03762>`_, with an equal share of the
    channels for each coordinate.

    Args:
        channels (int): Size of each input and output sample.
        num_coordinates (int, optional): The number of coordinates of a position.
            (default: :obj:`1`)
        size (tuple[int, ...], optional): The number of positions along each coordinate,
            for learned embeddings. With :obj:`None`, embeddings are sinusoidal.
            (default: :obj:`None`)

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F)`, edge indices (not used),
          positions :math:`(|\mathcal{V}|, D)`, integers from zero on
        - **output:** :math:`(|\mathcal{V}|, F)`

    Raises:
        ValueError: If :obj:`size` has the wrong length, or sinusoids do not fit into
            :obj:`channels`; in the forward method, if positions have the wrong shape or
            are beyond the table.
    """

    def __init__(
        self,
        channels: int,
        num_coordinates: int = 1,
        size: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        channels = check_integer("channels", channels, 1)
        num_coordinates = check_integer("num_coordinates", num_coordinates, 1)
        if size is not None:
            size = tuple(check_integer("size", number, 1) for number in size)
        if size is not None and len(size) != num_coordinates:
            raise ValueError(
                f"'size' must have {num_coordinates} numbers of places, got {size}"
            )
        if size is None and channels % (2 * num_coordinates) != 0:
            raise ValueError(
                f"'channels' must be a multiple of {2 * num_coordinates} for sinusoids "
                f"of {num_coordinates} coordinates, got {channels}"
            )
        self.channels = channels
        self.num_coordinates = num_coordinates
        self.size = size
        self.table = None
        if size is not None:
            self.table = torch.nn.Embedding(math.prod(size), channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        if self.table is not None:
            torch.nn.init.trunc_normal_(self.table.weight, std=0.02)

    def forward(self, x: Tensor, edge_index: Adj | None, pos: Tensor) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): Not used; accepted for containers
                that call all their layers in the same way.
            pos (torch.Tensor): The positions.
        """
        check_inputs(x, self.channels)
        if pos.shape != (x.size(0), self.num_coordinates):
            raise ValueError(
                f"'pos' must be of shape [{x.size(0)}, {self.num_coordinates}], got "
                f"{list(pos.shape)}"
            )
        if self.table is None or self.size is None:
            return x + self._waves(pos).to(x.dtype)
        place = pos.new_zeros(pos.size(0), dtype=torch.long)
        bad = torch.zeros_like(place, dtype=torch.bool)
        whole, read = pos.long(), readable()
        if read and bool((pos != whole).any()):
            raise ValueError("'pos' must hold whole numbers for learned embeddings")
        for coordinate, size in zip(whole.unbind(1), self.size, strict=True):
            out = (coordinate < 0) | (coordinate >= size)
            if read and bool(out.any()):
                raise ValueError(
                    f"'pos' must be in [0, size) with size={self.size}, the places "
                    f"that have learned embeddings, got {int(coordinate[out][0])}"
                )
            place, bad = place * size + coordinate, bad | out
        # Where nothing is read, the table itself refuses what is not in it.
        return x + self.table(place.masked_fill(bad, -1))

    def _waves(self, pos: Tensor) -> Tensor:
        """Sines and cosines of each coordinate, in float32 or more."""
        dtype = torch.promote_types(pos.dtype, torch.float32)
        size = self.channels // self.num_coordinates
        angle = rotary_angles(pos.unsqueeze(2), size, dtype)
        return torch.cat([angle.sin(), angle.cos()], dim=2).flatten(1)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.channels}, {self.num_coordinates}, "
            f"size={self.size})"
        )
