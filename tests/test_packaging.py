"""What a user gets: versions, types, a light import, a complete wheel."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pyg_chimera

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyg_chimera"
HEAVY = {
    *("lightning", "lightning_fabric", "matplotlib", "ogb", "pandas", "rdkit"),
    *("sklearn", "torch_scatter", "torch_sparse", "torchmetrics"),
}


def modules_loaded_by(statement: str) -> set[str]:
    """The top-level modules that a statement loads beyond what PyG loads itself."""
    code = (
        "import sys, torch, torch_geometric.data, torch_geometric.nn\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+([.+\-]\w+)*", pyg_chimera.__version__)
    assert importlib.metadata.version("pyg-chimera") == pyg_chimera.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{pyg_chimera.__version__.split('.dev')[0]}]" in changelog


def test_importing_the_package_is_light():
    loaded = modules_loaded_by("import pyg_chimera")
    assert "pyg_chimera" in loaded
    assert loaded & (HEAVY | {"numba", "scipy", "networkx"}) == set()


def test_importing_the_subpackages_needs_no_extra():
    names = ", ".join(
        f"pyg_chimera.{name}" for name in ("ops", "nn", "transforms", "datasets")
    )
    loaded = modules_loaded_by(f"import {names}")
    assert loaded & HEAVY == set()


def test_import_leaves_the_environment_alone():
    code = (
        "import os, torch\n"
        "before = dict(os.environ), torch.get_num_threads(), torch.get_rng_state()\n"
        "import pyg_chimera.nn, pyg_chimera.transforms, pyg_chimera.datasets\n"
        "assert dict(os.environ) == before[0]\n"
        "assert torch.get_num_threads() == before[1]\n"
        "assert torch.equal(torch.get_rng_state(), before[2])\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('untouched')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "untouched"


def test_every_folder_with_sources_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


@pytest.mark.slow
def test_wheel_is_complete(tmp_path):
    pytest.importorskip("setuptools", minversion="77.0.3")
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, source / "pyg_chimera", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as m; m.build_wheel('.')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, check=True, capture_output=True
    )
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    expected = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert expected | {"pyg_chimera/py.typed"} <= shipped
    info = f"pyg_chimera-{pyg_chimera.__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in shipped
    assert {name.split("/")[0] for name in shipped} == {"pyg_chimera", info}


def test_constraints_pin_every_requirement():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.\-]+==[\w.]+", pin) for pin in pins)
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    free = {"pyg-chimera", "torch-scatter", "torch-sparse", "triton"}
    for requirement in importlib.metadata.requires("pyg-chimera"):
        name = re.match(r"[\w.\-]+", requirement)[0].lower()
        assert name in pinned | free, requirement
