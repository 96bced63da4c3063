"""What the Chimera layers and the delta rule have in common."""

import pytest
import torch
from asserts import assert_near
from convs import CHANNELS, EDGE

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraGridConv,
    ChimeraPathConv,
    GatedDeltaConv,
)

PATH = torch.stack([torch.arange(5), torch.arange(1, 6)])
BOTH = torch.cat([PATH, PATH.flip(0)], dim=1)
LAYERS = [
    (ChimeraConv, BOTH, {"edge_dim": EDGE}),
    (ChimeraDAGConv, PATH, {"edge_dim": EDGE, "groups": 2}),
    (ChimeraPathConv, BOTH, {}),
    (GatedDeltaConv, BOTH, {}),
    (GatedDeltaConv, PATH, {"acyclic": True, "conv_kernel": 1}),
]


@pytest.mark.parametrize(("layer", "index", "options"), LAYERS)
def test_a_difference_of_two_recurrences(layer, index, options):
    """Heads of two layers that share all but what their transitions depend on."""
    conv = layer(CHANNELS, heads=2, state_channels=3, differential=True, **options)
    conv.contrast.data = torch.tensor([0.3, -2.0])
    parts = [layer(CHANNELS, heads=2, state_channels=3, **options) for _ in range(2)]
    for part, own in enumerate(parts):
        state = dict(conv.state_dict())
        del state["contrast"]
        for name in ("lin_delta.weight", "lin_edge.weight", "delta_bias", "edge_bias"):
            if name in state:
                axis = 1 if name.endswith("bias") else 0
                two = state[name].unflatten(axis, (-1, 2))
                state[name] = two.select(axis + 1, part)
        own.load_state_dict(state)
    x, attr = torch.randn(6, CHANNELS), None
    if "edge_dim" in options:
        attr = torch.randn(index.size(1), EDGE)
    got, read = conv(x, index, attr), []
    for own in parts:
        own.output = lambda y, x, value, scale=None: (
            read.append(y if scale is None else y * scale.exp().unsqueeze(-1)) or value
        )
        value = own(x, index, attr)
        del own.output
    y = read[0] - conv.contrast.view(-1, 1) * read[1]
    assert_near(got, parts[0].output(y, x, value), 1e-5)


@pytest.mark.parametrize(("layer", "index", "options"), LAYERS)
def test_what_is_alike_cancels(layer, index, options):
    """Transitions that do not differ, and all of the second: the skip alone is left."""
    conv = layer(CHANNELS, heads=2, state_channels=3, differential=True, **options)
    conv.contrast.data.fill_(1)
    for name, x in conv.named_parameters():
        if name in ("lin_delta.weight", "lin_edge.weight"):
            x.data.zero_()
        if name in ("delta_bias", "edge_bias"):
            x.data.fill_(-1.0)
    x, attr = torch.randn(6, CHANNELS), None
    if "edge_dim" in options:
        attr = torch.randn(index.size(1), EDGE)
    other = torch.cat([torch.randn(5, CHANNELS), x[5:]])
    assert_near(conv(x, index, attr)[5], conv(other, index, attr)[5], 1e-5)


def test_a_differential_sequence_is_continued():
    conv = ChimeraGridConv(
        CHANNELS, heads=2, num_dags=1, window=(1, 4), differential=True
    )
    x, state = torch.randn(7, CHANNELS), None
    for i, row in enumerate(conv(x, height=1, width=7)):
        out, state = conv.step(x[i : i + 1], state)
        assert_near(out[0], row, 1e-5)
