from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module

from pyg_chimera.nn.models._lattice import lattice_layers, structure_of
from pyg_chimera.nn.models.graph_model import GraphModel

__all__ = ["ImageClassifier"]


class ImageClassifier(GraphModel):
    r"""A vision model with a choice of mixers: embedded patches, pre-norm layers of a
    mixer and a feed-forward network, and a classifier of the mean over patches. With
    :obj:`mixer="attention"` it is a `Vision Transformer
    <https://arxiv.org/abs/2010.11929>`_.

    Images are graphs from :class:`~pyg_chimera.transforms.ImageToGraph`. A batch may
    hold images of different sizes:

    .. code-block:: python

        to_graph = ImageToGraph(patch_size=4)
        batch = Batch.from_data_list([to_graph(image) for image in images])
        model = ImageClassifier(3 * 4 * 4, 64, 10, mixer="chimera")
        out = model(**model.inputs(batch))

    Args:
        in_channels (int): The number of pixels of a patch times the number of channels,
            or :obj:`-1` to derive it from the first input.
        channels (int): The size of patches between the layers.
        out_channels (int): The number of classes.
        num_layers (int, optional): The number of layers. (default: :obj:`4`)
        mixer (str or Callable, optional): :obj:`"chimera"`
            (:class:`~pyg_chimera.nn.ChimeraGridConv`), :obj:`"plstm"`
            (:class:`~pyg_chimera.nn.PLSTMGridConv`, with modes P and D in turn),
            :obj:`"graph_mamba"` (:class:`~pyg_chimera.nn.GraphMambaConv`, forwards and
            backwards along the rows, laid end to end), :obj:`"attention"`
            (:class:`~pyg_chimera.nn.SelfAttention`), or a function that builds one from
            its position in the stack. (default: :obj:`"chimera"`)
        heads, position, dropout, mlp_channels, mixer_kwargs (optional): As in
            :class:`~pyg_chimera.nn.SequenceEncoder`.
        size (tuple[int, int], optional): The largest number of columns and rows, for
            learned positions. (default: :obj:`None`)

    Shapes:
        - **input:** as in :class:`~pyg_chimera.nn.GraphModel`, with heights, widths and
          positions from :class:`~pyg_chimera.transforms.ImageToGraph` if the layers
          take them: see :meth:`inputs`
        - **output:** classes :math:`(B, F_{out})`

    Raises:
        ValueError: If an option is unknown, or incompatible with another.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        out_channels: int,
        num_layers: int = 4,
        mixer: str | Callable[[int], Module] = "chimera",
        heads: int | None = None,
        *,
        position: str | None = None,
        size: tuple[int, int] | None = None,
        dropout: float = 0.0,
        mlp_channels: int | None = None,
        mixer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        layers = lattice_layers(
            mixer,
            channels,
            heads,
            num_layers,
            num_dags=4,
            position=position,
            size=size,
            mixer_kwargs=mixer_kwargs,
            dropout=dropout,
            mlp_channels=mlp_channels,
        )
        super().__init__(
            in_channels,
            channels,
            out_channels,
            layers,
            head_layers=1,
            norm="layer_norm",
            structure=structure_of(layers),
        )
