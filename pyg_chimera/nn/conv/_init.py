import math

import torch
from torch import Tensor

__all__ = ["log_uniform_softplus_"]


@torch.no_grad()
def log_uniform_softplus_(bias: Tensor, low: float = 1e-3, high: float = 1e-1) -> None:
    """Fills a bias as Mamba does: its softplus is log-uniform in [low, high]."""
    delta = torch.empty_like(bias).uniform_(math.log(low), math.log(high)).exp()
    bias.copy_(delta + torch.log(-torch.expm1(-delta)))
