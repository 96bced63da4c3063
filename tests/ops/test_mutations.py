"""A sign that is off anywhere in a kernel is noticed by the comparison with oracles."""

import ast
import importlib
import inspect
import sys
import textwrap

import pytest
from operators import OPERATORS, assert_results, computed, expected_of, make_case
from poison import poison


class Flip(ast.NodeTransformer):
    """Changes the sign of one of the sums into an array; says when it is run."""

    def __init__(self, number: int) -> None:
        self.left = number

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.AST]:
        self.left -= isinstance(node.target, ast.Subscript)
        if self.left != -1 or not isinstance(node.target, ast.Subscript):
            return node
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return [*ast.parse("seen.append(1)").body, node]


@pytest.mark.parametrize(
    ("name", "key"), [("paths", "undirected_paths"), ("grid_sweep", "grid_scan")]
)
def test_mistakes_are_found(name: str, key: str, monkeypatch):
    """All that a small batch runs into; kernels run as plain Python."""
    poison(monkeypatch)
    module = importlib.import_module(f"pyg_chimera.ops.recurrence.cpu.{name}")
    operator, found = OPERATORS[key], 0
    batch = list(operator.structures.values())[-2]
    case = make_case(operator, batch, tuple(min(x, 2) for x in operator.sizes[0]))
    forms = [x for x in operator.variants.values() if x.get("backend") == "numba"]
    for function in [x for x in vars(module).values() if inspect.isfunction(x)]:
        for number in range(99 * (function.__module__ == module.__name__)):
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            tree.body[0].decorator_list, flip, seen = [], Flip(number), []
            tree = ast.fix_missing_locations(flip.visit(tree))
            if flip.left >= 0:
                break
            scope: dict = {}
            exec(compile(tree, "mutant", "exec"), vars(module) | {"seen": seen}, scope)
            with monkeypatch.context() as patch:
                for other in [m for n, m in sys.modules.items() if "pyg_chimera" in n]:
                    for attribute in [
                        k for k, x in vars(other).items() if x is function
                    ]:
                        patch.setattr(other, attribute, scope[function.__name__])
                wrong = 0
                for options in forms:
                    try:
                        assert_results(computed(case, options), expected_of(case))
                    except AssertionError:
                        wrong += 1
            assert bool(wrong) == bool(seen), (function.__name__, number)
            found += bool(seen)
    assert found > 5
