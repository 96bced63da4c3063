"""Who may import whom, and where operators and kernels may be."""

import ast
import re
from pathlib import Path

import networkx
import pytest

PACKAGE = Path(__file__).parents[1] / "pyg_chimera"
#: Each may import those before it, and itself.
LEVELS = ("ops.common", "ops.structure", "ops", "transforms", "loader", "nn",
          "datasets", "utils", "graphgym", "calibrate", "compile",
          "selftest", "__init__")  # fmt: skip
#: What may import only its own level: transforms do not know layers, nor the reverse.
STRANGERS = {("nn", "transforms"), ("datasets", "nn"), ("transforms", "nn")}
FILES = sorted(PACKAGE.rglob("*.py"))


def level(module: str) -> str | None:
    name = module.removeprefix("pyg_chimera.")
    fitting = [x for x in LEVELS if name == x or name.startswith(f"{x}.")]
    return max(fitting, key=len, default=None)


def imported(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [
        x.module if isinstance(x, ast.ImportFrom) else alias.name
        for x in nodes
        if isinstance(x, ast.Import | ast.ImportFrom)
        for alias in x.names
    ]
    return set(filter(None, names))


@pytest.mark.parametrize("path", FILES, ids=lambda x: str(x.relative_to(PACKAGE)))
def test_imports_go_down(path):
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    own = level(module)
    for name in imported(path):
        other = level(name) if name.startswith("pyg_chimera.") else None
        assert own is not None, f"{module} has no level"
        if other is None or own == other:
            continue
        assert LEVELS.index(other) < LEVELS.index(own), f"{module} imports {name}"
        assert (own, other) not in STRANGERS, f"{module} imports {name}"


def test_there_are_no_circles():
    """Not even by imports within functions."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in FILES
    }
    graph = networkx.DiGraph()
    for module, path in modules.items():
        for x in ast.walk(ast.parse(path.read_text())):
            if isinstance(x, ast.ImportFrom):
                for name in (f"{x.module}.{alias.name}" for alias in x.names):
                    found = name if name in modules else x.module
                    found = found if found in modules else f"{found}.__init__"
                    graph.add_edge(module.removesuffix(".__init__"), found)
    assert graph.number_of_edges() > 500
    assert networkx.is_directed_acyclic_graph(graph), networkx.find_cycle(graph)


def operator_of(module: str) -> str | None:
    """The declaration of an operator: a folder, or a module of `ops/recurrence`."""
    found = re.match(r"pyg_chimera\.ops\.(\w+)\.", f"{module}.")
    if found and (PACKAGE / "ops" / found[1] / "op.py").exists():
        return found[1]
    found = re.match(r"pyg_chimera\.ops\.recurrence\.(\w+)\.", f"{module}.")
    file = PACKAGE / "ops" / "recurrence" / f"{found[1] if found else ''}.py"
    declares = file.exists() and ".public(" in file.read_text()
    return found[1] if found and declares else None


@pytest.mark.parametrize("path", FILES, ids=lambda x: str(x.relative_to(PACKAGE)))
def test_no_operator_imports_another(path):
    """What two of them need is in a room of `ops/recurrence`, or in `ops/common`."""
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    own, names = operator_of(module), imported(path)
    names |= {  # modules that are imported from a package
        f"{x.module}.{alias.name}"
        for x in ast.walk(ast.parse(path.read_text()))
        if isinstance(x, ast.ImportFrom)
        for alias in x.names
    }
    if own or room_of(module) or "ops.common" in module:
        assert {operator_of(name) for name in names} <= {None, own}
        assert "pyg_chimera.ops" not in names  # which has the operators' functions


#: Of `ops/recurrence`; each may import those before it, and itself.
ROOMS = ("plan", "dense", "plain", "cpu", "gpu", "choose")


def room_of(module: str) -> str | None:
    found = re.match(r"pyg_chimera\.ops\.recurrence\.(\w+)", module)
    return found[1] if found and found[1] in ROOMS else None


@pytest.mark.parametrize("path", FILES, ids=lambda x: str(x.relative_to(PACKAGE)))
def test_rooms_of_recurrences_are_in_order(path):
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    own = room_of(module)
    for other in filter(None, map(room_of, imported(path))):
        assert own is None or ROOMS.index(other) <= ROOMS.index(own)


def test_operators_are_found():
    assert operator_of("pyg_chimera.ops.recurrence.dag_scan") == "dag_scan"
    assert operator_of("pyg_chimera.ops.grid_conv.op") == "grid_conv"
    assert operator_of("pyg_chimera.ops.recurrence.cpu.sweep") is None
    assert operator_of("pyg_chimera.ops.recurrence.plan.states") is None


@pytest.mark.parametrize("path", FILES, ids=lambda x: str(x.relative_to(PACKAGE)))
def test_operators_and_kernels_are_in_ops(path):
    if PACKAGE / "ops" in path.parents:
        return
    assert not any(name.split(".")[0] == "numba" for name in imported(path))
    assert "torch.library" not in path.read_text()


#: What compiles a function, which then has no types.
COMPILERS = {"_compiles_to", "compiled", "inlined", "intrinsic", "jit", "overload",
             "lower_builtin", "triton.jit", "type_callable"}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda x: str(x.relative_to(PACKAGE)))
def test_only_kernels_have_no_types(path):
    tree = ast.parse(path.read_text())
    rooms = [tree, *(x for x in tree.body if isinstance(x, ast.ClassDef))]
    for function in (x for room in rooms for x in room.body):
        if isinstance(function, ast.FunctionDef) and function.returns is None:
            calls = [getattr(x, "func", x) for x in function.decorator_list]
            assert COMPILERS & set(map(ast.unparse, calls)), function.name


def kernels(path: Path) -> list[ast.FunctionDef]:
    """The functions of a file that Triton compiles."""
    functions = (
        x
        for x in ast.walk(ast.parse(path.read_text()))
        if isinstance(x, ast.FunctionDef)
    )
    return [x for x in functions if "triton.jit" in map(ast.unparse, decorators(x))]


def decorators(function: ast.FunctionDef) -> list[ast.expr]:
    found = function.decorator_list
    return [x.func if isinstance(x, ast.Call) else x for x in found]


def test_kernels_are_for_the_oldest_triton():
    """Version 3.6 cannot parse nested targets. What `tl.dot` adds to is float32 unless
    it is told otherwise, so sums are written with `+=`, for float64.
    """
    found = [x for path in FILES for x in kernels(path)]
    assert len(found) > 60
    for kernel in found:
        for x in ast.walk(kernel):
            if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Tuple):
                nested = [isinstance(y, ast.Tuple) for y in x.targets[0].elts]
                assert not any(nested), ast.unparse(x)
            if isinstance(x, ast.Call) and ast.unparse(x.func) == "tl.dot":
                assert len(x.args) == 2, ast.unparse(x)


def test_private_parts_of_pytorch_are_used_in_one_file():
    private = re.compile(r"torch(\.\w+)*\._[a-z]\w*|torch\._C|_current_level")
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if private.search(path.read_text())
    }
    assert found == {"ops/common/torch_private.py"}
