"""Runs a script of GraphGym or GraphGPS with the layers registered."""

import os
import runpy
import sys

from pyg_chimera.graphgym import register

USAGE = "usage: python -m pyg_chimera.graphgym main.py --cfg config.yaml [...]"


def main() -> None:
    """Runs the script, the first argument, as `python` itself would."""
    script = sys.argv[1] if len(sys.argv) > 1 else None
    if script in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}")
        raise SystemExit
    if script is None or not os.path.exists(script):
        problem = "no script given" if script is None else f"no such file: '{script}'"
        print(f"{USAGE}\nerror: {problem}", file=sys.stderr)
        raise SystemExit(2)
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    register()  # once more, as GraphGPS may be next to the script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
