import torch
from torch import Tensor


def householder_product(vectors: Tensor) -> Tensor:
    r"""The orthogonal matrix of a product of Householder reflections,

    .. math::
        \mathbf{Q} = \prod_{i=1}^{r} \left( \mathbf{I} - 2
        \frac{\mathbf{v}_i \mathbf{v}_i^{\top}}{\mathbf{v}_i^{\top} \mathbf{v}_i}
        \right)

    with which the transitions of `"pLSTM: parallelizable Linear Source Transition Mark
    networks" <https://arxiv.org/abs/2506.11997>`_ track states and remain bounded: the
    singular values of :math:`\mathbf{U} \, \textrm{diag}(\mathbf{g}) \,
    \mathbf{W}^{\top}`, where :math:`\mathbf{U}` and :math:`\mathbf{W}` are such
    products, are :math:`|\mathbf{g}|`. Any orthogonal matrix is a product of at most
    :math:`J` reflections. The lengths of the vectors don't matter, and a vector of
    zeros reflects nothing.

    Args:
        vectors (torch.Tensor): The vectors :math:`\mathbf{v}_i`, floating point.

    Shapes:
        - **input:** vectors :math:`(*, r, J)`
        - **output:** matrices :math:`(*, J, J)`, of the same dtype; computed in
          float32 at least

    Raises:
        ValueError: If :obj:`vectors` has fewer than two dimensions.
        TypeError: If :obj:`vectors` isn't real and floating point.

    Example:
        >>> householder_product(torch.tensor([[3.0, 0.0]]))
        tensor([[-1.,  0.],
                [ 0.,  1.]])
    """
    if not isinstance(vectors, Tensor) or not vectors.is_floating_point():
        got = getattr(vectors, "dtype", type(vectors).__name__)
        raise TypeError(f"'vectors' must be a floating point tensor, got {got}")
    if vectors.dim() < 2:
        raise ValueError(
            "'vectors' must be of shape [..., num_vectors, size], got shape "
            f"{list(vectors.shape)}; use vectors.unsqueeze(0) for a single one"
        )
    size = vectors.size(-1)
    unit = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    if unit.numel() > 0:
        # Squares of very long or short vectors overflow or underflow. As lengths don't
        # matter, this factor needs no gradient.
        largest = unit.detach().abs().amax(-1, keepdim=True)
        unit = unit / torch.where(largest > 0, largest, 1)
    square = unit.square().sum(-1, keepdim=True)
    factor = torch.where(square > 0, 2 / torch.where(square > 0, square, 1), 0)

    matrix = torch.eye(size, dtype=unit.dtype, device=unit.device)
    matrix = matrix.expand(*unit.shape[:-2], size, size)
    for v, s in zip(unit.unbind(-2), factor.unbind(-2), strict=True):
        # Sums of products rather than matmul, which autocast would round.
        along = (matrix * v.unsqueeze(-2)).sum(-1, keepdim=True)
        matrix = matrix - along * (s * v).unsqueeze(-2)
    return matrix.to(vectors.dtype).contiguous()
