"""What a user gets: versions, types, a light import, a complete wheel."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import pyg_chimera

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyg_chimera"
HEAVY = {
    *("lightning", "lightning_fabric", "matplotlib", "ogb", "pandas", "rdkit"),
    *("networkx", "pymetis", "pytorch_lightning", "wntr", "yacs"),
    *("sklearn", "torch_scatter", "torch_sparse", "torchmetrics"),
}


PROBE = """
import json, os, sys
import torch, torch_geometric.data, torch_geometric.nn

def state():
    return dict(os.environ), torch.get_num_threads(), torch.get_rng_state().tolist()

modules, before = set(sys.modules), state()
for statement in sys.argv[1:]:
    exec(statement)
    loaded = {name.split(".")[0] for name in set(sys.modules) - modules}
    print(json.dumps({
        "loaded": sorted(loaded),
        "untouched": state() == before,
        "cuda": torch.cuda.is_initialized(),
    }))
"""


def after(*statements: str) -> list[dict[str, Any]]:
    """What a fresh process that has loaded PyG finds after each of the statements."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *statements],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in result.stdout.splitlines()[-len(statements) :]]


def test_nothing_leads_to_a_repository_of_our_name():
    """None is known to exist: whoever made one would have our users."""
    pages = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for path in [*pages, ROOT / "docs/conf.py", *PACKAGE.glob("**/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"//[^\s\"')]*pyg[-_]chimera", text), path


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+([.+\-]\w+)*", pyg_chimera.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released, *coming = pyg_chimera.__version__.split(".dev")
    assert f"## [{'Unreleased' if coming else released}]" in changelog
    limitations = (ROOT / "docs/limitations.md").read_text(encoding="utf-8")
    minor = ".".join(pyg_chimera.__version__.split(".")[:2])
    assert re.search(rf"^This is version {minor}[:,]", limitations, re.MULTILINE)


def test_imports_are_light_and_have_no_side_effects():
    """That of the package, and then those of all in it; they need no extra."""
    names = ("ops", "nn", "transforms", "loader", "datasets", "utils")
    everything = "import " + ", ".join(f"pyg_chimera.{name}" for name in names)
    package, all_of_it = after("import pyg_chimera", everything)
    assert "pyg_chimera" in package["loaded"]
    assert "numba" not in package["loaded"]
    for found in (package, all_of_it):
        assert HEAVY.isdisjoint(found["loaded"])
        assert found["untouched"]
        assert not found["cuda"]


def test_every_folder_with_sources_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


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


def test_source_archive_is_complete(tmp_path):
    pytest.importorskip("setuptools", minversion="77.0.3")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    source = tmp_path / "source"
    for name in filter(lambda x: (ROOT / x).is_file(), listed):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as m; m.build_sdist('.')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, check=True, capture_output=True
    )
    (archive,) = source.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        shipped = {name.partition("/")[2] for name in file.getnames()}
    left_out = (".", "benchmarks/", "docs/", "tests/")
    assert {x for x in listed if not x.startswith(left_out)} <= shipped
    assert [x for x in shipped if x.startswith(left_out[1:])] == []
    assert archive.stat().st_size < 2**20


def test_operators_register_with_the_oldest_pytorch_allowed():
    """PyTorch 2.5 knows `typing.List` in signatures, but not `list`."""
    registered = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            decorators = getattr(node, "decorator_list", [])
            names = ("custom_op", "structural_op")
            if any(name in ast.unparse(x) for x in decorators for name in names):
                registered += [
                    (f"{path.name}:{x.lineno}", x.arg, ast.unparse(x.annotation))
                    for x in node.args.args
                ]
    assert len(registered) > 10
    assert [x for x in registered if "list[" in x[2]] == []


def test_constraints_pin_every_requirement():
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [p for p in pins if not re.fullmatch(r"[\w.\-]+==[\w.]+", p)] == []
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = list(project["project"]["dependencies"])
    for extra in ("examples", "docs", "dev"):  # what the Makefile installs
        wanted += extras[extra]
    names = {re.match(r"[\w.\-]+", requirement)[0].lower() for requirement in wanted}
    assert names - pinned == {"setuptools"}  # torch wants a recent one


def test_numba_is_capped_at_what_is_tested():
    """Kernels are cached by classes of `numba.core`, which any version may change."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (cap,) = re.findall(r'"numba>=[\d.]+,<0\.(\d+)"', text)
    (tested,) = re.findall(r"^numba==0\.(\d+)\.", pins, re.MULTILINE)
    assert int(cap) == int(tested) + 1


def test_citation_names_the_last_release():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d[^]]*)\]", changelog, re.MULTILINE)
    assert f"\nversion: {releases[0]}\n" in text


def test_workflows_run_what_there_is():
    yaml = pytest.importorskip("yaml")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    extras = set(
        re.findall(r"^(\w+) = \[", _table("optional-dependencies"), re.MULTILINE)
    )
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert len(workflows) == 3
    for path in workflows:
        text = path.read_text(encoding="utf-8")
        jobs = yaml.safe_load(text)["jobs"].values()
        steps = [step for job in jobs for step in job["steps"]]
        assert all(("run" in step) != ("uses" in step) for step in steps)
        for names in re.findall(r"step: \[(.*)\]", text):
            assert set(names.split(", ")) <= targets
        for names in re.findall(r"\.\[([\w,]+)\]", text):
            assert set(names.split(",")) <= extras
        for file in re.findall(r"tests/[\w/]+\.py|\.ci/run", text):
            assert (ROOT / file).is_file()


def test_the_table_of_versions_is_what_is_tested():
    """The rows of the pinned versions, and of the workflows."""
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "|" in line]
    found = {row[0].split(",")[0]: row[1:] for row in rows}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = [
        re.search(rf"^{name}==(.*)$", pins, re.MULTILINE)[1]
        for name in ("torch", "torch-geometric", "numba")
    ]
    assert found["every change"][1:4] == pinned
    tests = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    pythons = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", tests)[1])
    assert found["pull requests"][0] == f"{pythons[0]} to {pythons[-1]}"
    oldest = re.findall(r'python: "(.*)"\n.*torch==(.*)\.\* .*==(.*)\.\*', tests)
    systems = re.search(r'python-version: "(.*)"', tests.partition("systems:")[2])
    assert found["the same"][0] == systems[1]  # the last row that begins so
    (row,) = [row[1:] for row in rows if row[0] == "the same, oldest"]
    assert row[:3] == [", ".join(x[0] for x in oldest), oldest[0][1], oldest[0][2]]
    (least, cap) = re.search(r'"numba>=(.*),<0\.(\d+)"', _pyproject()).groups()
    assert f"numba is {least} to 0.{int(cap) - 1}, Triton" in page
    assert f"Triton {re.search(r'triton>=([0-9.]+)', _pyproject())[1]} or newer" in page


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def _table(name: str) -> str:
    """The lines of a table of pyproject.toml."""
    return _pyproject().partition(f".{name}]\n")[2].partition("\n[")[0]
