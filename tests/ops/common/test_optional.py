"""Packages that only some functions need."""

import sys

import pytest

from pyg_chimera.ops.common.optional import required


def test_a_module_of_a_package_that_is_there():
    assert required("json.decoder", "A test", "dev").JSONDecoder


def test_a_package_that_is_missing():
    message = r"^A test needs 'no_such_package': pip install 'pyg-chimera\[dev\]'$"
    for module in ("no_such_package", "no_such_package.part"):
        with pytest.raises(ImportError, match=message):
            required(module, "A test", "dev")


def test_what_a_package_itself_lacks_is_no_reason_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        required("broken_package", "A test", "dev")
    assert "broken_package" not in sys.modules
