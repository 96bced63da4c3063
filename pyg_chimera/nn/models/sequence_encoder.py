from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from pyg_chimera.nn.encoders import PositionEmbedding
from pyg_chimera.nn.models._lattice import lattice_layers, structure_of
from pyg_chimera.nn.models.graph_model import GraphModel
from pyg_chimera.ops.common.checks import check_option

__all__ = ["SequenceEncoder"]


class SequenceEncoder(GraphModel):
    r"""A model of token sequences with a choice of mixers: embeddings, pre-norm layers
    of a mixer and a feed-forward network, and a head.

    Sequences are graphs from :class:`~pyg_chimera.transforms.SequenceToGraph`. A batch
    may hold sequences of any lengths, without padding except in attention:

    .. code-block:: python

        to_graph = SequenceToGraph(vocabulary)
        batch = Batch.from_data_list([to_graph(text) for text in texts])
        model = SequenceEncoder(len(vocabulary), 64, mixer="chimera", head="mlm")
        out = model(**model.inputs(batch))  # [tokens of all sequences, vocabulary]

    Args:
        num_tokens (int): The size of the vocabulary. For :obj:`head="mlm"`, this
            includes the token that stands for masked ones.
        channels (int): The size of tokens between the layers.
        out_channels (int, optional): The number of classes, for
            :obj:`head="classify"`. (default: :obj:`None`)
        num_layers (int, optional): The number of layers. (default: :obj:`4`)
        mixer (str or Callable, optional): :obj:`"chimera"`
            (:class:`~pyg_chimera.nn.ChimeraGridConv` on one row), :obj:`"chimera_path"`
            (:class:`~pyg_chimera.nn.ChimeraPathConv`), :obj:`"plstm"`
            (:class:`~pyg_chimera.nn.PLSTMGridConv` in mode D), :obj:`"graph_mamba"`
            (:class:`~pyg_chimera.nn.GraphMambaConv` in the order of the sequence),
            :obj:`"attention"` (:class:`~pyg_chimera.nn.SelfAttention`), or a function
            that builds one from its position in the stack, which for :obj:`head="lm"`
            must be causal. (default: :obj:`"chimera"`)
        heads (int, optional): The number of heads of the mixers. (default: the
            largest of 4, 2 and 1 that divides :obj:`channels`)
        head (str, optional): What is predicted: the token at each position, from both
            sides (:obj:`"mlm"`, as in masked language models), the next token, from the
            past only (:obj:`"lm"`), or the class of a sequence (:obj:`"classify"`).
            (default: :obj:`"mlm"`)
        position (str, optional): How positions of tokens are encoded: :obj:`"learned"`
            or :obj:`"sinusoidal"` embeddings
            (:class:`~pyg_chimera.nn.PositionEmbedding`), or, for attention,
            :obj:`"rotary"`. Only attention needs this. (default: :obj:`None`)
        size (int, optional): The largest length, for learned positions.
            (default: :obj:`None`)
        dropout (float, optional): Dropout probability after the mixer and in the
            feed-forward network. (default: :obj:`0.0`)
        mlp_channels (int, optional): The hidden size of the feed-forward networks.
            (default: :obj:`None`, :obj:`2 * channels`)
        mixer_kwargs (Mapping[str, Any], optional): Further arguments of the mixers.
            (default: :obj:`None`)

    Shapes:
        - **input:** as in :class:`~pyg_chimera.nn.GraphModel`, with tokens
          :math:`(|\mathcal{V}|)`, int64, and whatever the layers take from
          :class:`~pyg_chimera.transforms.SequenceToGraph`: see :meth:`inputs`
        - **output:** logits :math:`(|\mathcal{V}|, \textrm{tokens})`, or
          :math:`(B, F_{out})` for classes

    Raises:
        ValueError: If an option is unknown, or incompatible with another.
    """

    def __init__(
        self,
        num_tokens: int,
        channels: int,
        out_channels: int | None = None,
        num_layers: int = 4,
        mixer: str | Callable[[int], Module] = "chimera",
        heads: int | None = None,
        *,
        head: str = "mlm",
        position: str | None = None,
        size: int | None = None,
        dropout: float = 0.0,
        mlp_channels: int | None = None,
        mixer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_option("head", head, ("mlm", "lm", "classify"))
        if (head == "classify") != (out_channels is not None):
            raise ValueError(
                "'out_channels', the number of classes, must be given for "
                f"head='classify' and for no other, got {out_channels} and {head!r}"
            )
        layers = lattice_layers(
            mixer,
            channels,
            heads,
            num_layers,
            num_dags=1 if head == "lm" else 2,
            position=position,
            size=None if size is None else (size,),
            mixer_kwargs=mixer_kwargs,
            dropout=dropout,
            mlp_channels=mlp_channels,
        )
        super().__init__(
            [num_tokens],
            channels,
            num_tokens if out_channels is None else out_channels,
            layers,
            head="graph" if head == "classify" else "node",
            head_layers=1,
            norm="layer_norm",
            structure=structure_of(layers),
        )
        self.num_tokens = num_tokens
        self.causal = head == "lm"

    def step(self, token: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        r"""Extends each sequence by one token; returns the output of :meth:`forward`
        for this token. Except in attention, the time is independent of how many tokens
        came before. Requires :obj:`head="lm"`.

        Args:
            token (torch.Tensor): The new tokens, one for each sequence, int64
                :math:`[B]`.
            state (Any, optional): The state that the previous step returned. (default:
                :obj:`None`, for the first tokens)

        Returns:
            tuple[torch.Tensor, Any]: The logits of the next tokens,
            :math:`[B, \textrm{tokens}]`, and the state for the next step.

        Raises:
            ValueError: If the model is not causal.
        """
        if not self.causal:
            raise ValueError("Sequences are continued by a model with head='lm'")
        if token.dim() != 1:
            raise ValueError(
                "'token' must be one token of each sequence, of shape [B], got "
                f"{list(token.shape)}"
            )
        place, states = (0, [None] * len(self.layers)) if state is None else state
        x, after = self.node_encoder(token.view(-1, 1)), []
        for layer, before in zip(self.layers, states, strict=True):
            if isinstance(layer, PositionEmbedding):
                pos = torch.full((x.size(0), 1), place, device=x.device)
                x = layer(x, None, pos)
            else:
                x, before = cast(Any, layer).step(x, before)
            after.append(before)
        return self.mlp(self.norm(x)), (place + 1, after)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        num_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        r"""Extends sequences by tokens drawn from the model's predictions, in
        evaluation mode. Requires :obj:`head="lm"`.

        Args:
            prompt (torch.Tensor): The tokens to begin with, int64 :math:`[n]`, or
                :math:`[B, n]` for several sequences of the same length, with
                :math:`n > 0`.
            num_tokens (int): How many tokens to append.
            temperature (float, optional): Divides the logits; :obj:`0` selects the most
                likely token. (default: :obj:`1.0`)
            generator (torch.Generator, optional): Draws the tokens. (default:
                :obj:`None`, PyTorch's global one)

        Returns:
            torch.Tensor: The prompt followed by the new tokens, with the same number of
            dimensions.

        Raises:
            TypeError: If the prompt is not a tensor.
            ValueError: If the model is not causal, the prompt is empty or has the wrong
                shape, or a number is negative.
        """
        if not isinstance(prompt, Tensor):
            raise TypeError(
                "'prompt' must be a tensor of tokens of shape [n] or [B, n], got "
                f"{type(prompt).__name__}"
            )
        if prompt.dim() not in (1, 2) or prompt.numel() == 0:
            raise ValueError(
                "'prompt' must be tokens of shape [n] or [B, n] with n > 0, got "
                f"{list(prompt.shape)}"
            )
        if not (num_tokens >= 0 and temperature >= 0):
            raise ValueError(
                "'num_tokens' and 'temperature' must not be negative, got "
                f"{num_tokens} and {temperature}"
            )
        tokens = list(prompt.view(-1, prompt.size(-1)).unbind(1))
        modes, state = {m: m.training for m in self.modules()}, None
        self.eval()
        try:
            for i in range(prompt.size(-1) + num_tokens - 1):
                logits, state = self.step(tokens[i], state)
                if i + 1 < len(tokens):
                    continue
                if temperature == 0:
                    tokens.append(logits.argmax(1))
                    continue
                logits = logits.double() - logits.amax(1, keepdim=True)
                share = (logits / temperature).softmax(1)
                tokens.append(torch.multinomial(share, 1, generator=generator)[:, 0])
        finally:
            for module, mode in modes.items():
                module.training = mode
        return torch.stack(tokens, dim=1).view(*prompt.shape[:-1], -1)
