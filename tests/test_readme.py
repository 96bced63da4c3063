"""Runs the Python blocks of the README and of the documentation, as they stand."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCK = r"^```{}\n(.*?)^```$"
GYM_PAGE = "docs/graphgym.md"
TASKS_PAGE = "docs/tasks.md"
PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
#: Run in a checkout: what they need, and why.
IN_A_CHECKOUT = {
    "docs/meshes.md": ("matplotlib", "needs the extra 'examples'"),
    "docs/power.md": None,
    "docs/water.md": ("wntr", "reads networks: the extra 'water'"),
}
#: Run when the documentation is built, and not here.
NOTEBOOKS = [
    f"docs/notebooks/{path.name}" for path in (ROOT / "docs/notebooks").glob("*.md")
]


def package(program: torch.export.ExportedProgram, package_path: str) -> str:
    torch.export.save(program, package_path)
    return package_path


UNCOMPILED = {
    "aoti_compile_and_package": package,
    "aoti_load_package": lambda path: torch.export.load(path).module(),
}


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of a page, each at its line so that errors point there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern = BLOCK.format(language)
    return [
        "\n" * text.count("\n", 0, match.start(1)) + match[1]
        for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("page", sorted(page for page in PAGES if blocks(page)))
def test_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if page in IN_A_CHECKOUT:
        if extra := IN_A_CHECKOUT[page]:
            pytest.importorskip(extra[0], reason=extra[1])
        (tmp_path / "docs").symlink_to(ROOT / "docs")
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks/comparisons"))
    # The blocks must run where no C++ compiler is installed, and quickly:
    compile_eagerly = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    for name, stand_in in UNCOMPILED.items():
        monkeypatch.setattr(f"torch._inductor.{name}", stand_in)
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        exec(compile(block, str(ROOT / page), "exec"), names)
    result = names.get("out", names.get("loss"))
    assert isinstance(result, torch.Tensor)
    assert torch.isfinite(result).all()
    if page == TASKS_PAGE:  # all models have learnt: guessing gives the numbers behind
        assert names["accuracy"] > 0.6  # 0.25
        assert names["part_accuracy"] > 0.6  # 0.25
        assert names["auc"] > 0.8  # 0.5
        assert names["explained"] > 0.7  # 0
        assert names["mae"] < 0.1  # 0.15
        assert names["typed_accuracy"] > 0.7  # 0.5
        assert names["val_accuracy"] > 0.7  # 0.33
        assert names["restored"].hparams == names["trainer"].lightning_module.hparams
    if page == "docs/meshes.md":
        assert names["share"] < 0.5  # 1
    if page == "docs/heterogeneous.md":
        assert names["hetero_accuracy"] > 0.7  # 0.5


def test_configurations_have_known_options():
    yacs = pytest.importorskip("yacs.config", reason="GraphGym needs yacs")
    pytest.importorskip("pyg_chimera.graphgym")
    from torch_geometric.graphgym.config import set_cfg

    found = [yacs.CfgNode.load_cfg(text) for text in blocks(GYM_PAGE, "yaml")]
    assert len(found) == 4
    for config in found:
        known = yacs.CfgNode()
        set_cfg(known)
        if "gt" in config:  # GraphGPS has options that only its checkout knows
            config = yacs.CfgNode({"chimera": config.chimera})
        known.merge_from_other_cfg(config)
        for name in config.get("chimera", {}):
            assert f"`{name}`" in (ROOT / GYM_PAGE).read_text(encoding="utf-8")


def test_readme_keeps_its_promises():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = blocks("README.md")
    assert len([line for line in example.splitlines() if line.strip()]) <= 16
    assert len(text.splitlines()) <= 110
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "lint", "docs", "bench", "help"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make demo" in text
    assert "make test" in text


def test_the_program_runs_once_as_a_script_also_in_two_processes(tmp_path):
    """Containers that import their caller would run it again. Parameters without
    gradients would be an error in the second step of distributed training.
    """
    (program,) = blocks("README.md")
    setup = f"""
import sys, torch.distributed
store, rank = "file://{tmp_path.as_posix()}/store", int(sys.argv[1])
torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2)
torch.manual_seed(rank)
"""
    wrapped = "ddp = torch.nn.parallel.DistributedDataParallel(model)\noptimizer ="
    program = program.replace("optimizer =", wrapped).replace("(model(", "(ddp(")
    weights = "print(sum(p.double().abs().sum().item() for p in ddp.parameters()))\n"
    (tmp_path / "program.py").write_text(setup + program + weights, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "program.py", rank],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [len(output) for output in outputs] == [2, 2]  # a loss, and the sum
    assert outputs[0][1] == outputs[1][1]


@pytest.mark.parametrize("page", sorted(NOTEBOOKS))
def test_notebooks_are_run_and_checked(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    header = re.match(r"---\n(.*?)^---\n", text, re.MULTILINE | re.DOTALL)
    # Without these lines, cells would be shown and not run:
    assert "file_format: mystnb\n" in header[1]
    assert "kernelspec:\n  name: python3\n" in header[1]
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert f"\n{page.removeprefix('docs/').removesuffix('.md')}\n" in index
    assert blocks(page) == []
    cells = blocks(page, r"\{code-cell\}")
    assert len(cells) == text.count("{code-cell}")
    checks = [cell for cell in cells if ":tags: [remove-cell]" in cell]
    assert checks
    for cell in cells:
        code = cell.replace(":tags: [remove-cell]\n", "\n")
        compile(code, page, "exec")
        assert ("\nassert " in code) == (cell in checks)
        assert max(map(len, code.splitlines())) <= 88


@pytest.mark.parametrize("page", sorted(PAGES + NOTEBOOKS))
def test_links_to_files_hold(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    missing = [target for target in targets if not (folder / target).exists()]
    assert missing == []
