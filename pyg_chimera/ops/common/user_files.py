"""Small JSON files in the user's cache folder, which all their processes share."""

import json
import os
from pathlib import Path
from typing import Any


def user_file(name: str) -> Path:
    """Where a file is kept: in ``$XDG_CACHE_HOME``, or in ``~/.cache``.

    Raises:
        RuntimeError: If there is no home.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "pyg_chimera" / name


def write_json(file: Path, content: Any) -> None:
    """Writes a file at once: another process may be reading it.

    Raises:
        OSError: If that is impossible.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    temporary.replace(file)
