"""Lists the commands that made the files in `benchmarks/results/`, as recorded there::

    make results

`PYG_CHIMERA_SHARED` and `--root` say where data are. Scripts that have moved from
`examples/` to `benchmarks/comparisons/` since are shown with their new place.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: What takes about an hour or longer, on one core.
LONG = {
    "peptides-func.json": "20 minutes for each of four models, and an hour for two",
    "tudataset-proteins.json": "an hour and three quarters",
}


def found(results: Any) -> Iterator[str]:
    """The commands in a file, however deep."""
    if isinstance(results, dict):
        if isinstance(results.get("command"), str):
            yield results["command"]
        results = list(results.values())
    if isinstance(results, list):
        for part in results:
            yield from found(part)


def moved(command: str) -> str:
    """The command with its script where it is now."""

    def place(match: re.Match[str]) -> str:
        here = (ROOT / match[0]).exists()
        return match[0] if here else f"benchmarks/comparisons/{match[1]}"

    return re.sub(r"examples/(\w+\.py)", place, command)


def main() -> None:
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        took = f"  ({LONG[path.name]})" if path.name in LONG else ""
        print(f"{path.name}{took}")
        for command in dict.fromkeys(map(moved, found(json.loads(path.read_text())))):
            print(f"    {command}")


if __name__ == "__main__":
    main()
