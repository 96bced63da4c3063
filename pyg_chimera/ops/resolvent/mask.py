"""The mask form: matrix products, given the resolvents."""

from torch import Tensor

__all__ = ["masked_mix", "masked_mix_backward"]


def masked_mix(L: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    r"""Computes :math:`(L \odot Q K^T) V`.

    Args:
        L (torch.Tensor): The resolvents, [..., heads, n, n].
        query (torch.Tensor): [..., groups, n, N], where groups divides heads.
        key (torch.Tensor): [..., groups, n, N].
        value (torch.Tensor): [..., heads, n, P].
    """
    return (_grouped(L, query) * _scores(query, key)).flatten(-4, -3) @ value


def masked_mix_backward(
    L: Tensor, query: Tensor, key: Tensor, value: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `masked_mix`: of the resolvents, query, key and value."""
    scores = _scores(query, key)
    L = _grouped(L, query)
    grad_value = (L * scores).flatten(-4, -3).transpose(-1, -2) @ grad
    grad_mask = _grouped(grad @ value.transpose(-1, -2), query)
    grad_L = (grad_mask * scores).flatten(-4, -3)
    grad_scores = (grad_mask * L).sum(-3)
    return (
        grad_L,
        grad_scores @ key,
        grad_scores.transpose(-1, -2) @ query,
        grad_value,
    )


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2)).unsqueeze(-3)


def _grouped(x: Tensor, query: Tensor) -> Tensor:
    """[..., heads, n, n] -> [..., groups, heads a group, n, n]."""
    return x.unflatten(-3, (query.size(-3), -1))
