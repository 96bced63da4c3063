"""Arrays share memory with tensors, keep them alive, and leave no mark on them."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import pyg_chimera
from pyg_chimera.ops.common.array_views import as_array

PACKAGE = Path(pyg_chimera.__file__).parent


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.arange(3, dtype=torch.half),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 1)),
        torch.empty(0, 3),
        torch.empty(3, 0).t(),
        torch.arange(12).view(3, 4).t(),
        torch.arange(12)[1::5],
        torch.complex(torch.ones(4), torch.arange(4.0)).conj().imag,
        torch.complex(torch.ones(4), torch.arange(4.0)).conj().imag[1:2],
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_numbers_and_storage(x):
    found = as_array(x)
    assert x.untyped_storage().resizable()
    expected = x.detach().clone().resolve_neg().numpy()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)
    assert found.flags.c_contiguous
    assert found.flags.aligned


def test_memory_is_shared_and_lives_as_long_as_the_array():
    x = torch.zeros(1000)
    found, storage = as_array(x), x.untyped_storage()._weak_ref()
    found[3] = 5
    assert x.tolist() == [0, 0, 0, 5] + 996 * [0]
    del x
    assert not torch.UntypedStorage._expired(storage)
    assert found[:4].tolist() == [0, 0, 0, 5]
    del found
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_what_has_no_memory_to_read():
    with FakeTensorMode():
        fake = torch.ones(3)
    for x in (fake, torch.ones(3, device="meta"), torch._efficientzerotensor(3)):
        with pytest.raises(TypeError, match="expected a tensor in memory, got"):
            as_array(x)
    with pytest.raises(KeyError, match="bfloat16"):
        as_array(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="storage"):
        torch.vmap(lambda x: as_array(x) and x)(torch.ones(3))
    with pytest.raises(RuntimeError, match="Contiguous"):
        as_array(torch.eye(2).to_sparse())


def test_nothing_else_reads_tensors_by_numpy():
    """Their marks are invisible until somebody else resizes the storage."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("numpy", "__array__"):
                found.append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []
