"""Results as JSON: a row of a table, or a curve, is one line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Dictionaries that fit are written on one line.
WIDTH = 120


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file atomically, so that it is never seen in part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(layout(content) + "\n")
    os.replace(part, path)


def layout(content: Any, depth: int = 0) -> str:
    """Formats JSON with each item of a list of lists or dictionaries on its own line.

    Lists of numbers or strings are one line, and so are short dictionaries.
    """
    line = json.dumps(content)
    if not isinstance(content, dict | list) or depth + len(line) <= WIDTH:
        return line
    if isinstance(content, dict):
        start, stop = "{}"
        items = [
            f"{json.dumps(key)}: {layout(x, depth + 1)}" for key, x in content.items()
        ]
    elif any(isinstance(x, dict | list) for x in content):
        start, stop = "[]"
        items = [json.dumps(x) for x in content]
    else:
        return line
    margin = "\n" + " " * depth
    return start + ",".join(f"{margin} {x}" for x in items) + margin + stop
