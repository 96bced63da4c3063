"""Models of images and of sequences, with each of their mixers."""

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv

from pyg_chimera.nn import (
    ChimeraGridConv,
    ChimeraPathConv,
    GPSLayer,
    GraphMambaConv,
    ImageClassifier,
    PLSTMGridConv,
    PositionEmbedding,
    SelfAttention,
    SequenceEncoder,
)
from pyg_chimera.ops import unchecked
from pyg_chimera.transforms import ImageToGraph, SequenceToGraph

C, TOKENS = 16, 5
IMAGE_MIXERS = ("chimera", "plstm", "graph_mamba", "attention")
SEQUENCE_MIXERS = (*IMAGE_MIXERS, "chimera_path")
POSITIONS = (None, "learned", "sinusoidal")
mixers_of_images = pytest.mark.parametrize("mixer", IMAGE_MIXERS)
mixers_of_sequences = pytest.mark.parametrize("mixer", SEQUENCE_MIXERS)


def images(*sizes: tuple[int, int]) -> Batch:
    to_graph = ImageToGraph(patch_size=2)
    graphs = [to_graph(torch.rand(3, 2 * h, 2 * w)) for h, w in sizes]
    return Batch.from_data_list(graphs)


def sequences(*lengths: int) -> Batch:
    to_graph = SequenceToGraph()
    graphs = [to_graph(torch.randint(TOKENS, (n,))) for n in lengths]
    return Batch.from_data_list(graphs)


def classifier(mixer, **kwargs) -> ImageClassifier:
    return ImageClassifier(12, C, 3, num_layers=2, mixer=mixer, heads=2, **kwargs)


def encoder(mixer, **kwargs) -> SequenceEncoder:
    return SequenceEncoder(TOKENS, C, num_layers=2, mixer=mixer, heads=2, **kwargs)


@mixers_of_images
@pytest.mark.parametrize("position", POSITIONS)
def test_images_of_several_sizes(mixer, position):
    size = (4, 4) if position == "learned" else None
    model = classifier(mixer, position=position, size=size)
    batch = images((2, 3), (4, 4), (1, 1), (3, 1))
    for _ in range(2):
        out = model(**model.inputs(batch))
        each = [model(**model.inputs(data)) for data in batch.to_data_list()]
        assert out.shape == (4, 3)
        assert_near(out, torch.cat(each), 1e-4)
        model.eval()  # and evaluation does the same as training
    model.train()
    again = model(**model.inputs(batch))
    assert_near(out, again, 1e-6)
    again.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@mixers_of_images
def test_where_patches_are(mixer):
    """All mixers but attention tell an image from one whose patches are exchanged."""
    model = classifier(mixer)
    batch = images((3, 3))
    out = model(**model.inputs(batch))
    batch.x = batch.x[torch.randperm(9)]
    moved = model(**model.inputs(batch))
    assert torch.allclose(out, moved, atol=1e-5) == (mixer == "attention")
    if mixer == "attention":
        for position in ("learned", "sinusoidal", "rotary"):
            size = (3, 3) if position == "learned" else None
            model = classifier(mixer, position=position, size=size)
            out = model(**model.inputs(batch))
            batch.x = batch.x.roll(1, 0)
            assert not torch.allclose(out, model(**model.inputs(batch)), atol=1e-5)


@mixers_of_sequences
@pytest.mark.parametrize("head", ["mlm", "lm", "classify"])
def test_sequences_of_several_lengths(mixer, head):
    if (mixer, head) == ("chimera_path", "lm"):
        with pytest.raises(ValueError, match="'mixer' must not be 'chimera_path'"):
            encoder(mixer, head=head)
        return
    model = encoder(mixer, head=head, out_channels=3 if head == "classify" else None)
    batch = sequences(3, 7, 1, 4)
    out = model(**model.inputs(batch))
    assert out.shape == ((4, 3) if head == "classify" else (15, TOKENS))
    each = [model(**model.inputs(data)) for data in batch.to_data_list()]
    assert_near(out, torch.cat(each), 1e-4)
    assert_near(model.eval()(**model.inputs(batch)), out, 1e-6)
    out.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@mixers_of_sequences
def test_what_is_heard(mixer):
    """From both sides, or in a causal model from the past alone."""
    data = sequences(9)
    x = data.x.clone()
    x[4] = (x[4] + 1) % TOKENS
    for head, before in (("mlm", True), ("lm", False)):
        if (mixer, head) == ("chimera_path", "lm"):
            continue
        model = encoder(mixer, head=head)
        data.x = data.x
        out = model(**model.inputs(data))
        changed = model(**(model.inputs(data) | {"x": x}))
        differs = (out - changed).abs().amax(1) > 1e-6
        assert differs[4:].all()
        assert differs[:4].all() if before else not differs[:4].any()


@pytest.mark.parametrize("mixer", SEQUENCE_MIXERS)
def test_a_sequence_is_learnt(mixer):
    """The first token, told at the last place, of which attention needs to know."""
    torch.manual_seed(1)
    position = "rotary" if mixer == "attention" else None
    model = encoder(mixer, head="classify", out_channels=TOKENS, position=position)
    to_graph = SequenceToGraph()
    graphs = []
    for _ in range(64):
        graph = to_graph(torch.randint(TOKENS, (6,)))
        graph.y = graph.x[:1]
        graphs.append(graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        for batch in DataLoader(graphs, batch_size=32):
            loss = F.cross_entropy(model(**model.inputs(batch)), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] > 1
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("mixer", IMAGE_MIXERS)
@pytest.mark.parametrize("position", POSITIONS)
def test_step_by_step(mixer, position):
    """With a kept state, the same numbers as all at once."""
    size = 9 if position == "learned" else None
    model = encoder(mixer, head="lm", position=position, size=size).double()
    spread(model)
    tokens, to_graph = torch.randint(TOKENS, (3, 9)), SequenceToGraph()
    batch = Batch.from_data_list([to_graph(row) for row in tokens])
    expected = model(**model.inputs(batch)).view(3, 9, TOKENS)
    state = None
    for i in range(9):
        out, state = model.step(tokens[:, i], state)
        assert_near(out, expected[:, i], 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixer", IMAGE_MIXERS)
def test_step_by_step_in_half_precision(mixer, dtype):
    """Beyond the whole numbers that such types hold."""
    length = 300 if dtype == torch.bfloat16 else 20
    for position, size in (("learned", length), ("sinusoidal", None)):
        model = encoder(mixer, head="lm", position=position, size=size).to(dtype)
        data = SequenceToGraph()(torch.randint(TOKENS, (length,)))
        with torch.no_grad():
            expected, state = model(**model.inputs(data)), None
            for i in range(length):
                out, state = model.step(data.x[i : i + 1], state)
        assert out.dtype == dtype
        assert_near(out[0].float(), expected[-1].float(), 0.05)


def spread(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))


@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "chimera", "mixer_kwargs": {"selectivity": "target", "groups": 2}},
        {"mixer": "chimera", "mixer_kwargs": {"roots": "silent", "gated": False}},
        {"mixer": "plstm", "mixer_kwargs": {"mode": "P", "state_channels": 3}},
        {"mixer": "graph_mamba", "mixer_kwargs": {"expand": 2, "bias": True}},
        {"mixer": "attention", "position": "rotary"},
    ],
)
def test_steps_of_other_options(options):
    model = encoder(head="lm", **options).double()
    spread(model)
    data = sequences(6)
    expected, state = model(**model.inputs(data)), None
    for i in range(6):
        out, state = model.step(data.x[i : i + 1], state)
        assert_near(out[0], expected[i], 1e-9)


@pytest.mark.parametrize("mixer", IMAGE_MIXERS)
def test_generation(mixer):
    model = encoder(mixer, head="lm", dropout=0.5)
    spread(model)
    prompt = torch.randint(TOKENS, (2, 3))
    draw = torch.Generator()
    out = model.generate(prompt, 5, generator=draw.manual_seed(1))
    assert out.shape == (2, 8)
    assert torch.equal(out[:, :3], prompt)
    assert torch.equal(model.generate(prompt, 5, generator=draw.manual_seed(1)), out)
    assert model.training
    model.layers[0].eval()  # frozen
    model.generate(prompt, 1)
    assert [layer.training for layer in model.layers][:2] == [False, True]
    model.train()
    greedy = model.generate(prompt[0], 5, temperature=0)
    model.eval()
    for i in range(3, 8):  # each is the likeliest behind those before it
        data = SequenceToGraph()(greedy[:i])
        assert model(**model.inputs(data))[-1].argmax() == greedy[i]
    assert torch.equal(model.generate(prompt, 0), prompt)
    shares = torch.zeros(TOKENS)
    many = model.generate(prompt[:1].repeat(2000, 1), 1, generator=draw)
    shares = many[:, 3].bincount(minlength=TOKENS) / 2000
    expected = model(**model.inputs(SequenceToGraph()(prompt[0])))[-1].softmax(0)
    assert_near(shares, expected, 0.1)


def test_what_cannot_be_continued():
    prompt = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="by a model with head='lm'"):
        encoder("chimera").generate(prompt, 1)
    model = encoder("chimera", head="lm")
    for arguments, match in (
        ((prompt[:0], 1), r"n > 0, got \[0\]"),
        ((prompt.view(1, 1, 3), 1), r"got \[1, 1, 3\]"),
        ((prompt, -1), "must not be negative, got -1"),
        ((prompt, 1, -1.0), "must not be negative, got 1 and -1.0"),
    ):
        with pytest.raises(ValueError, match=match):
            model.generate(*arguments)
    x = torch.randn(2, C)
    for mixer, match in (
        (ChimeraGridConv(C, num_dags=2), "with num_dags=1"),
        (PLSTMGridConv(C), "with num_dags=1, got 4"),
        (GraphMambaConv(C), "with order='order'"),
        (GraphMambaConv(C, order="order", bidirectional=True), "bidirectional=False"),
        (SelfAttention(C), "with causal=True"),
        (ChimeraPathConv(C), "has a method 'step'"),
    ):
        with pytest.raises(ValueError, match=match):
            GPSLayer(C, mixer=mixer, norm=None).step(x)
    with pytest.raises(ValueError, match="a layer without 'conv'"):
        GPSLayer(C, GCNConv(C, C), SelfAttention(C, causal=True)).step(x)


def test_own_mixers():
    model = SequenceEncoder(TOKENS, C, mixer=lambda index: ChimeraPathConv(C, heads=2))
    data = sequences(4, 3)
    assert model(**model.inputs(data)).shape == (7, TOKENS)
    options = {"share": "diagonal", "state_channels": 7}
    model = classifier("chimera", mixer_kwargs=options)
    assert model.layers[0].mixer.share == "diagonal"
    assert model.layers[0].mixer.state_channels == 7


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        (classifier, {"mixer": "mamba"}, "'mixer' must be a function or one of"),
        (classifier, {"mixer": "chimera_path"}, "must not be 'chimera_path'"),
        (classifier, {"position": "absolute"}, "'position' must be one of"),
        (classifier, {"position": "rotary"}, "mixer='attention' only"),
        (classifier, {"position": "learned"}, "'size', .* must be given"),
        (classifier, {"size": (2, 2)}, "'size', .* for no other"),
        (classifier, {"position": "learned", "size": 7}, "columns and rows .* got 7"),
        (
            classifier,
            {"mixer_kwargs": {"heads": 2}},
            r"not have \['heads'\], which",
        ),
        (classifier, {"mixer": SelfAttention, "mixer_kwargs": {"a": 1}}, "itself sets"),
        (encoder, {"head": "lm", "mixer_kwargs": {"num_dags": 2}}, "'num_dags'"),
        (encoder, {"head": "classify"}, "'out_channels', the number of classes"),
        (encoder, {"out_channels": 3}, "'out_channels', the number of classes"),
        (encoder, {"head": "bert"}, "'head' must be one of"),
    ],
)
def test_bad_options(build, options, match):
    with pytest.raises(ValueError, match=match):
        build(**({"mixer": "chimera"} | options))


def test_bad_inputs():
    model = encoder("chimera")
    data = sequences(3)
    data.x[1] = TOKENS
    with pytest.raises(ValueError, match="Categories must lie in"):
        model(**model.inputs(data))
    model = encoder("attention", position="learned", size=2)
    with pytest.raises(ValueError, match=r"'pos' must be in .*\(2,\).* got 2"):
        model(**model.inputs(sequences(3)))
    with pytest.raises(ValueError, match=r"of shape \[B\], got \[1, 3\]"):
        encoder("chimera", head="lm").step(data.x.view(1, 3))
    with pytest.raises(TypeError, match="'prompt' must be a tensor of tokens"):
        encoder("chimera", head="lm").generate([1, 2], 3)
    del data.width
    with pytest.raises(ValueError, match="no attribute 'width'"):
        encoder("chimera").inputs(data)


def test_positions():
    pos = torch.tensor([[0, 0], [1, 0], [0, 2]])
    x = torch.zeros(3, 8)
    table = PositionEmbedding(8, 2, (2, 3))
    out = table(x, None, pos)
    assert_near(out, table.table.weight[[0, 3, 2]], 0)
    waves = PositionEmbedding(8, 2)
    out = waves(x, None, pos.float())
    assert torch.equal(out[1, 4:], out[0, 4:])
    assert torch.equal(out[2, :4], out[0, :4])
    assert not torch.equal(out[1, :4], out[0, :4])
    assert [p for p in waves.parameters() if p.requires_grad] == []
    assert repr(table) == "PositionEmbedding(8, 2, size=(2, 3))"
    with pytest.raises(ValueError, match=r"\(2, 3\), .* got -1"):
        table(x, None, pos - 1)
    long = torch.tensor([[0, 500], [0, 0], [0, 1]])
    half = waves.bfloat16()(x.bfloat16(), None, long).float()
    assert_near(half, PositionEmbedding(8, 2)(x, None, long), 0.01)
    for arguments, match in (
        ((8, 2, (3,)), "'size' must have 2 numbers"),
        ((6, 2), "'channels' must be a multiple of 4"),
    ):
        with pytest.raises(ValueError, match=match):
            PositionEmbedding(*arguments)
    with pytest.raises(ValueError, match=r"'pos' must be of shape \[3, 2\], got \[3"):
        table(x, None, pos[:, :1])


def test_positions_beyond_the_table_are_refused_where_none_are_read():
    """Rather than taken for those of another row."""
    table, x = PositionEmbedding(8, 2, (4, 4)), torch.zeros(1, 8)
    compiled = torch.compile(table, fullgraph=True, backend="eager")
    assert_near(compiled(x, None, torch.tensor([[3, 2]])), table.table.weight[14:15], 0)
    for pos in ([[0, 5]], [[-1, 5]], [[4, 0]]):
        with pytest.raises(ValueError, match="'pos' must be in"):
            table(x, None, torch.tensor(pos))
        with unchecked(), pytest.raises(IndexError):
            table(x, None, torch.tensor(pos))
        with pytest.raises((IndexError, RuntimeError)):
            compiled(x, None, torch.tensor(pos))


def test_sizes_of_learned_positions_are_numbers():
    with pytest.raises(TypeError, match="'size' must be an integer"):
        encoder("attention", position="learned", size=(5,))


def test_what_layers_are_made_of():
    model = ImageClassifier(12, C, 3, num_layers=3, mixer="plstm", heads=2, dropout=0.3)
    assert [layer.mixer.mode for layer in model.layers] == ["P", "D", "P"]
    assert [layer.mixer.local_weight.shape[1:] for layer in model.layers] == [
        (3, 3)
    ] * 3
    assert {layer.drop.p for layer in model.layers} == {0.3}


def test_temperature_sharpens_what_is_drawn():
    model = encoder("chimera", head="lm")
    spread(model)
    model.eval()
    prompt = torch.randint(TOKENS, (3,))
    greedy = model.generate(prompt, 5, temperature=0)
    assert torch.equal(model.generate(prompt, 5, temperature=1e-39), greedy)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="'temperature' must not be negative"):
            model.generate(prompt, 1, temperature=wrong)
    draw = torch.Generator().manual_seed(0)
    many = prompt.repeat(4000, 1)
    many = model.generate(many, 1, temperature=0.5, generator=draw)[:, 3]
    expected = 2 * model(**model.inputs(SequenceToGraph()(prompt)))[-1]
    assert_near(many.bincount(minlength=TOKENS) / 4000, expected.softmax(0), 0.06)
