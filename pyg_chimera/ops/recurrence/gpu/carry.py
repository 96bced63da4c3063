r"""States carried from span to span on a GPU: the upper level of a two-level scan.

.. math::
    h_s = a_s h_{s-1} + x_s

over the spans of a scan, where :math:`x_s` is the state after the rows of a span if it
starts from zero, and :math:`a_s` their total decay: zero at the start of a sequence, so
that all sequences are scanned as one. A program handles some channels, and many spans
at a time; the rows of different spans are processed in parallel elsewhere.
"""

import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import on_device_of

#: Spans and channels at a time.
_SPANS, _WIDTH = 32, 32


def carry(decay: Tensor, x: Tensor, reverse: bool = False) -> Tensor:
    """Sets x to the states after each span, or if reversed, before each span.

    Args:
        decay: [spans, ...].
        x: [spans, ...], with the same number of entries as `decay` or a multiple: each
            decay then applies to several consecutive entries.
        reverse: Whether to go from the last span to the first one.
    """
    if x.numel() == 0:
        return x
    size = x[0].numel()
    with on_device_of(x):
        _carry[(triton.cdiv(size, _WIDTH),)](
            decay, x, x.size(0), size, x.numel() // decay.numel(), reverse, _SPANS,
            _WIDTH, num_warps=4, num_stages=1,
        )  # fmt: skip
    return x


@triton.jit
def compose(a, x, b, y):
    """First a h + x, then b h + y; if b is zero, not even NaN passes."""
    cut = b == 0
    return tl.where(cut, b, a * b), tl.where(cut, y, b * x + y)


@triton.jit
def state_of(STATE, span, n, d, CHANNELS: tl.constexpr, STATES: tl.constexpr):
    """State n of STATE [spans, STATES, CHANNELS]; zero if there is no such span."""
    spans = tl.num_programs(0)
    at = tl.where(d < CHANNELS, span.to(tl.int64), spans)  # masks must be blocks
    there = (at >= 0) & (at < spans)
    at = (at * STATES + n) * CHANNELS + d
    return tl.load(STATE + at, mask=there, other=0.0)[None, :]


@triton.jit(do_not_specialize=["num_spans"])
def _carry(
    DECAY, X, num_spans, size, REPEATS: tl.constexpr, REVERSE: tl.constexpr,
    SPANS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All spans, WIDTH channels per program."""
    c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    o = tl.arange(0, SPANS)
    h = tl.zeros([WIDTH], X.dtype.element_ty)
    for first in range(0, num_spans, SPANS):
        there = (first + o < num_spans)[:, None] & (c < size)[None, :]
        span = (num_spans - 1 - first - o if REVERSE else first + o).to(tl.int64)
        at = X + span[:, None] * size + c[None, :]
        decays = DECAY + span[:, None] * (size // REPEATS) + (c // REPEATS)[None, :]
        a = tl.load(decays, mask=there, other=1.0)
        x = tl.load(at, mask=there, other=0.0)
        a, x = tl.associative_scan((a, x), 0, compose)
        x = tl.where(a == 0, x, a * h[None, :] + x)
        h = tl.sum(tl.where((o == SPANS - 1)[:, None], x, 0.0), 0)
        tl.debug_barrier()  # all must have read the old values before the store
        tl.store(at, x, mask=there)
