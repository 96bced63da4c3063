"""The direct term, by which nodes read what they write themselves: D (q^T k) v."""

from torch import Tensor


def direct_term(query: Tensor, key: Tensor, value: Tensor, direct: Tensor) -> Tensor:
    """[V, heads, P], for query and key [V, groups, N] and direct [V, heads]."""
    scores = (query * key).sum(-1).repeat_interleave(value.size(1) // query.size(1), 1)
    return (scores * direct).unsqueeze(-1) * value
