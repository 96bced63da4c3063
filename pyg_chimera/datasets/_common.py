"""What several data sets share: raw files, optional packages, processes, saving."""

import os
import os.path as osp
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from torch_geometric.data import Data, InMemoryDataset
from tqdm import tqdm

__all__ = ["find_raw", "map_in_processes", "require", "save_whole", "written_whole"]


def require(module: str, task: str) -> Any:
    """Imports an optional package on first use; names the extra if it is missing."""
    package = module.partition(".")[0]
    try:
        return __import__(module, fromlist=["_"])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(
            f"{task} needs '{package}': install it with "
            f"pip install 'pyg-chimera[examples]'"
        ) from error


def find_raw(folder: str, names: Sequence[str], source: str) -> str:
    """The path of the first of these raw files that exists."""
    for name in names:
        path = osp.join(folder, name)
        if osp.isfile(path):
            return path
    wanted = " or ".join(names)
    raise FileNotFoundError(f"No {wanted} in {folder}: put {source} there")


def map_in_processes(
    function: Callable, items: Sequence, num_workers: int, desc: str, log: bool
) -> Iterator:
    """``map`` with a progress bar, in other processes if there are any."""
    pool = None
    if num_workers > 0:
        # Fork would inherit the thread pools of torch and numba.
        pool = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"))
    try:
        results = (
            pool.map(function, items, chunksize=64)
            if pool is not None
            else map(function, items)
        )
        # None: shown on terminals only.
        yield from tqdm(
            results, total=len(items), desc=desc, disable=None if log else True
        )
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


@contextmanager
def written_whole(path: str) -> Iterator[str]:
    """Where to write what will be at the path. Interrupted or not, and with several
    processes at it, there is never half a file under the final name.
    """
    part = f"{path}.{os.getpid()}.part"
    yield part
    os.replace(part, path)


def save_whole(graphs: Sequence[Data], path: str) -> None:
    """Saves graphs as one file, see :func:`written_whole`."""
    with written_whole(path) as part:
        InMemoryDataset.save(graphs, part)
