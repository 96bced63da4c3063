"""Compares the backends with the reference on this machine, on tiny inputs.

``python -m pyg_chimera.selftest`` prints a table for bug reports; names of operators
select some.
"""

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

import torch

from pyg_chimera import __version__
from pyg_chimera.ops.common.operator import OPERATORS
from pyg_chimera.ops.common.verdicts import machine_of, remember, verdicts

__all__ = ["main"]


def main(names: Sequence[str] = ()) -> int:
    """Prints how all algorithms of some operators, or of all, do on this machine.

    Returns:
        int: 1 if anything is wrong, otherwise 0.
    """
    if {"-h", "--help"} & set(names):
        print(__doc__)
        return 0
    unknown = [name for name in names if name not in OPERATORS]
    if unknown:
        print(f"no such operators: {', '.join(unknown)}; known: {', '.join(OPERATORS)}")
        return 2
    failed = False
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    versions = ", ".join(f"{x} {version(x)}" for x in ("numba", "llvmlite"))
    print(f"pyg-chimera {__version__}, {versions}, Python {platform.python_version()}")
    print(platform.platform())
    for device in map(torch.device, devices):
        print(f"\n{device}: {machine_of(device)}\n")
        columns = ("operator", "solver", "form", "backend", "dtype", "error", "")
        print(_LINE.format(*columns))
        for name in names or OPERATORS:
            wrong: dict[str, str] = {}
            found = sorted(verdicts(OPERATORS[name], device).items(), key=str)
            for (choice, dtype), (error, problem) in found:
                failed |= bool(problem)
                kind = str(dtype).removeprefix("torch.")
                said = f"{error:.1e}", problem or "right"
                print(_LINE.format(*choice[:4], kind, *said))
                algorithm = " ".join(choice[:4])
                wrong[algorithm] = wrong.get(algorithm) or problem
            if device.type == "cuda":
                remember(machine_of(device), wrong)
    return int(failed)


_LINE = "{:22} {:10} {:6} {:9} {:9} {:>8}  {}"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
