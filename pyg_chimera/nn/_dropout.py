import torch
from torch import Tensor

_STEPS = 2**16


class Dropout(torch.nn.Dropout):
    r"""PyTorch's dropout with another generator of masks on CPUs, where PyTorch draws
    each number in 10 nanoseconds, a quarter of the time of training a small model.

    Here four numbers of 16 bits are cut from one of 64, so that :obj:`p` counts in
    steps of :math:`2^{-16}`; the scale is that of the rounded value, so that means stay
    exact.
    """

    def forward(self, input: Tensor) -> Tensor:
        dropped = round(self.p * _STEPS)
        draws = self.training and 0 < dropped < _STEPS and input.device.type == "cpu"
        if self.inplace or not draws or torch.compiler.is_compiling():
            return super().forward(input)
        size = input.numel()
        words = torch.empty((size + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        numbers = words.view(torch.int16)[:size].view(input.shape)
        keep = numbers >= dropped - _STEPS // 2
        return input * keep.to(input.dtype).mul_(_STEPS / (_STEPS - dropped))
