import inspect
import warnings

import pytest

from pyg_chimera.nn import GraphMambaConv, SwiGLU

RENAMED = {
    "GraphMambaConv": (GraphMambaConv, "channels", "in_channels"),
    "SwiGLU": (SwiGLU, "in_channels", "channels"),
}


@pytest.mark.parametrize("name", RENAMED)
def test_old_names_are_taken_with_a_warning(name):
    kind, old, new = RENAMED[name]
    with pytest.warns(
        DeprecationWarning, match=f"'{old}' of {name} is '{new}'"
    ) as said:
        module = kind(**{old: 8})
    assert said[0].filename == __file__
    assert getattr(module, new) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(kind(**{new: 8}), new) == getattr(kind(8), new) == 8
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{old}'"):
        kind(**{old: 8, new: 8})


@pytest.mark.parametrize("name", RENAMED)
def test_signatures_have_the_new_names(name):
    kind, old, new = RENAMED[name]
    assert old not in inspect.signature(kind).parameters
    assert next(iter(inspect.signature(kind).parameters)) == new
