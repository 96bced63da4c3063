"""What is special to `causal_conv1d`: a literal, and its options."""

import pytest
import torch
import torch.nn.functional as F
from operators import OPERATORS, example

from pyg_chimera.ops import causal_conv1d

VARIANTS = OPERATORS["causal_conv1d"].variants
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


@variants
def test_literal(options):
    """Sequences 1 2 3 and 4 5: nothing is seen of the one before."""
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    weight, ptr = torch.tensor([[10.0, 1.0]]), torch.tensor([0, 3, 5])
    out = causal_conv1d(x, weight, ptr=ptr, **options)
    assert out.flatten().tolist() == [1.0, 12.0, 23.0, 4.0, 45.0]
    out = causal_conv1d(x, weight, torch.tensor([0.5]), **options)
    assert out.flatten().tolist() == [1.5, 12.5, 23.5, 34.5, 45.5]


@variants
def test_activation(options):
    case = example("causal_conv1d")
    out = case(**options, activation="silu")
    assert torch.equal(out, F.silu(case(**options)))
