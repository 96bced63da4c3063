from types import SimpleNamespace

import epochs
from torch.autograd import DeviceType


def event(name, start, end, own, parent=None, number=-1):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        self_cpu_time_total=1e6 * own,
        cpu_parent=parent,
        sequence_nr=number,
        device_type=DeviceType.CPU,
    )


def test_operators_are_of_the_kind_of_what_they_are_part_of():
    """By hand: a mask, then a kernel, and their backward passes."""
    drop = event("dropout", 0, 10, 1)
    kernel = event("pyg_chimera::scan", 10, 20, 4, number=8)
    found = event("structure", 13, 14, 32, kernel)
    nodes = [
        event(f"{epochs.NODE}{name}", start, start + 10, 64, number=number)
        for name, start, number in (("Scan", 20, 8), ("Mul", 30, 7), ("Sum", 40, -1))
    ]
    times = epochs.times_by_kind(
        [
            drop,
            event("aten::mul", 2, 5, 3, drop, 7),
            kernel,
            event("aten::empty", 11, 12, 1, kernel, 8),
            found,
            event("aten::mm", 13, 14, 2, found),
            *nodes,
            event("pyg_chimera::scan_backward", 21, 29, 5, nodes[0]),
            event("aten::mul", 31, 34, 3, nodes[1], 7),
            event("aten::add_", 41, 42, 16, nodes[2]),
            event("Optimizer.step#AdamW.step", 50, 60, 128),
        ]
    )
    assert {kind: x for kind, x in times.items() if x} == {
        "dropout": 1 + 3 + 3,
        "kernels": 4 + 1,
        "their backward": 5,
        "structure": 32 + 2,
        "elementwise": 16,
        "optimizer": 128,
    }
