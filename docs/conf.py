"""Configuration of the documentation; it is built and read without a network."""

import importlib
import inspect
import os
import re
import shutil
import sys
from pathlib import Path

from ipykernel.kernelspec import write_kernel_spec
from sphinx.errors import ExtensionError

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyg_chimera

project = "pyg_chimera"
author = "The pyg_chimera authors"
copyright = "The pyg_chimera authors"
version = release = pyg_chimera.__version__

extensions = [
    "myst_nb",  # Markdown, and notebooks in Markdown
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # MathJax from a wheel, not from a CDN
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"pyg_chimera {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["narrow.css"]

# Notebooks run whenever their page is built, with this package, and by the interpreter
# that builds it, whatever other kernels there are.
KERNELS = Path(__file__).parent / "_build" / "jupyter" / "kernels"
shutil.rmtree(KERNELS, ignore_errors=True)
KERNELS.mkdir(parents=True)
write_kernel_spec(KERNELS / "python3")
for variable, first in (("JUPYTER_PATH", KERNELS.parent), ("PYTHONPATH", sys.path[0])):
    paths = [str(first), os.environ.get(variable)]
    os.environ[variable] = os.pathsep.join(filter(None, paths))
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # seconds for a cell: the first one may compile kernels
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress, and messages that kernels are compiled

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
pygments_style = "friendly"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints = "none"  # the docstrings state types, as PyG's do
toc_object_entries = False
autosummary_generate = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Layers with many arguments list them in three groups.
groups = ("Size", "Recurrence", "Attention", "Execution")
napoleon_custom_sections = ["Shapes", *((name, "params_style") for name in groups)]
python_maximum_signature_line_length = 80

# References to names of our own must resolve (-n); without a network there is nothing
# to resolve the names of PyTorch, PyG and Python against.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!pyg_chimera\b).*")]

#: The subpackages with a page of their own, listed in api/index.rst. A page has all
#: names of its module's `__all__`, so a new name is documented without a change here.
API = [
    "pyg_chimera.ops",
    "pyg_chimera.ops.structure",
    "pyg_chimera.nn",
    "pyg_chimera.transforms",
    "pyg_chimera.loader",
    "pyg_chimera.datasets",
    "pyg_chimera.utils",
    "pyg_chimera.graphgym",
]


def public_names(module_names: list[str]) -> dict[str, dict[str, list]]:
    """Sorts the public names of modules by what they are.

    What an earlier module has documented already is not documented again: names in
    "elsewhere" are the full ones under which it is found there.
    """
    documented: dict[int, str] = {}
    public = {}
    for module_name in module_names:
        module = importlib.import_module(module_name)
        names: dict[str, list] = {
            kind: [] for kind in ("functions", "classes", "data", "elsewhere")
        }
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):  # has a page if it is in API
                continue
            if id(value) in documented:
                names["elsewhere"].append(documented[id(value)])
                continue
            documented[id(value)] = f"{module_name}.{name}"
            if inspect.isclass(value):
                names["classes"].append(name)
            elif callable(value):
                names["functions"].append(name)
            else:
                names["data"].append((name, repr(value)))
        public[module_name] = names
    return public


autosummary_context = {"public": public_names(API)}


#: What a browser fetches by itself when it shows a page or reads a style sheet.
FETCHED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']((?:https?:)?//[^"']*)"""
    r"""|(?:@import|url\()\s*["']?((?:https?:)?//[^"')]*)"""
)


def check_offline(app, exception):
    """Fails the build where a page needs the network for more than its links."""
    if exception is not None:
        return
    fetched = set()
    for path in Path(app.outdir).rglob("*.*"):
        if path.suffix in (".html", ".css"):
            for match in FETCHED.finditer(path.read_text(encoding="utf-8")):
                fetched.add(match[1] or match[2])
    if fetched:
        raise ExtensionError(f"pages fetch from the network: {sorted(fetched)}")


def setup(app):
    """Called by Sphinx."""
    app.connect("build-finished", check_offline)
