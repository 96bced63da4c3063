import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import AddRandomWalkPE

from pyg_chimera.nn.encoders import LaplacianEncoder, RandomWalkEncoder


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def relu(x: torch.Tensor, *layers: torch.nn.Module) -> torch.Tensor:
    for layer in layers:
        x = layer(x).relu()
    return x


# Laplacian --------------------------------------------------------------------------


def test_laplacian_by_hand() -> None:
    encoder = LaplacianEncoder(3).eval()
    pe = torch.randn(4, 5, 2)
    expected = torch.zeros(4, 3)
    for node in range(4):
        for pair in pe[node]:
            expected[node] += relu(pair, *encoder.mlp.lins)
    assert encoder.mlp.channel_list == [2, 6, 3]
    torch.testing.assert_close(encoder(pe), expected)


def test_sizes_of_the_recipes() -> None:
    assert count(LaplacianEncoder(16)) == 624  # 10 or 16 frequencies: all the same
    assert count(LaplacianEncoder(8)) == 184
    assert count(RandomWalkEncoder(20, 16)) == 2 * 20 + 21 * 16


@pytest.mark.parametrize("training", [False, True])
def test_missing_pairs_add_nothing(training: bool) -> None:
    encoder = LaplacianEncoder(4).train(training)
    torch.nn.init.ones_(encoder.mlp.lins[-1].bias)  # a pair of zeros would add to it
    pe = torch.randn(3, 2, 2)
    pe[:, 0, 0] = 0.0  # an entry of zero alone is no missing one
    padded = torch.cat([pe, torch.zeros(3, 4, 2)], dim=1)
    torch.manual_seed(0)
    out = encoder(pe)
    torch.manual_seed(0)
    torch.testing.assert_close(encoder(padded), out)
    assert not torch.allclose(encoder(pe[:, 1:]), out)
    assert torch.equal(encoder(torch.zeros(3, 6, 2)), torch.zeros(3, 4))
    assert torch.equal(encoder(torch.zeros(3, 0, 2)), torch.zeros(3, 4))


def test_signs_are_flipped_in_training_only() -> None:
    encoder = LaplacianEncoder(4)
    pe = torch.randn(6, 2, 2)
    signs = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    variants = []
    for sign in signs:
        flipped = pe.clone()
        flipped[..., 0] *= sign
        variants.append(encoder.eval()(flipped))
    seen = set()
    encoder.train()
    for _ in range(60):
        out = encoder(pe)
        matches = [i for i, v in enumerate(variants) if torch.allclose(out, v)]
        assert (
            len(matches) == 1
        )  # one sign for each eigenvector, the same for all nodes
        seen.add(matches[0])
    assert seen == {0, 1, 2, 3}
    assert torch.equal(encoder.eval()(pe), encoder(pe))


def test_laplacian_gradients() -> None:
    encoder = LaplacianEncoder(8).double()
    pe = torch.randn(3, 4, 2, dtype=torch.double)
    pe[1, 2:] = 0
    encoder(pe).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    assert any(p.grad.abs().sum() > 0 for p in encoder.parameters())


def test_laplacian_errors() -> None:
    with pytest.raises(ValueError, match="'out_channels' must be an integer >= 1"):
        LaplacianEncoder(0)
    for shape in ((3, 2), (3, 4, 1)):
        with pytest.raises(ValueError, match=r"\[num_nodes, k, 2\], got \[3, "):
            LaplacianEncoder(4)(torch.zeros(shape))


# Random walks -----------------------------------------------------------------------


def test_random_walk_by_hand() -> None:
    encoder = RandomWalkEncoder(3, 4)
    pe = torch.rand(5, 3)
    normal = (pe - pe.mean(0)) / (pe.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(encoder(pe), encoder.lin(normal))
    torch.testing.assert_close(encoder.norm.norm.module.running_mean, 0.1 * pe.mean(0))
    encoder.eval()
    assert not torch.allclose(encoder(pe), encoder.lin(normal))


def test_random_walks_of_any_graph() -> None:
    """PyG's own transform is safe, and so is what reads it."""
    transform = AddRandomWalkPE(4, "pe")
    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = {
        "ring": Data(edge_index=ring, num_nodes=3),
        "isolated": Data(edge_index=ring, num_nodes=5),
        "loop": Data(edge_index=torch.tensor([[0], [0]]), num_nodes=1),
        "single": Data(edge_index=ring[:, :0], num_nodes=1),
        "empty": Data(edge_index=ring[:, :0], num_nodes=0),
    }
    found = {name: transform(data) for name, data in graphs.items()}
    assert found["ring"].pe.tolist() == [[0, 0, 1, 0]] * 3
    assert found["isolated"].pe[3:].tolist() == [[0.0] * 4] * 2
    assert found["loop"].pe.tolist() == [[1.0] * 4]
    encoder = RandomWalkEncoder(4, 2)
    for data in (*found.values(), Batch.from_data_list(list(found.values()))):
        out = encoder(data.pe)  # in training: a single node has no variance
        assert out.shape == (data.num_nodes, 2)
        assert out.isfinite().all()
    assert encoder.norm.norm.module.running_mean.isfinite().all()


def test_random_walk_errors() -> None:
    for sizes, message in (
        ((0, 4), "'walk_length' must be an integer >= 1"),
        ((4, 0), "'out_channels' must be an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RandomWalkEncoder(*sizes)
    for shape in ((3, 5), (4,)):
        with pytest.raises(ValueError, match=r"\[num_nodes, 4\], got \[.*walk_length"):
            RandomWalkEncoder(4, 2)(torch.zeros(shape))


# Both -------------------------------------------------------------------------------
