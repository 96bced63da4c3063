import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, TemporalData
from torch_geometric.data.datapipes import functional_transform

from pyg_chimera.ops.common.checks import check_integer
from pyg_chimera.transforms._inputs import Transform

__all__ = ["EventsToDAG"]

#: From the last state of the node itself, of its partner, and with this partner.
_KINDS = 3
_RESERVED = "x", "edge_index", "edge_attr", "event_index", "query_index", "carried"


@functional_transform("chimera_events_to_dag")
class EventsToDAG(Transform):
    r"""Converts a stream of events to a directed acyclic graph of the states of its
    nodes (functional name: :obj:`chimera_events_to_dag`).

    Layers for DAGs then compute what :class:`torch_geometric.nn.TGNMemory` keeps, a
    memory for each node, event by event, and with gradients through the whole past.

    Event :math:`e` gives both of its ends a new state, which is a node of the DAG:
    number :math:`2e` for the source, and :math:`2e + 1` for the destination. Up to
    three edges lead to a state, from the last state before the event

    0. of the same node,
    1. of the other end of the event, its partner,
    2. of the same node after an event with the same partner, in either direction.

    A query :math:`(u, v, t)`, such as a link to be predicted, has one state: that which
    :math:`u` would have after an event with :math:`v`. No edge leads on from it, and it
    sees all events before :math:`t`, but none at :math:`t`. Events that happen at the
    same time follow each other in the order of the stream.

    The DAG has

    * :obj:`x`, float :math:`[N, 8 + M]`: whether the state is a source's, and whether
      it is a destination's; for each of the three kinds of edges :math:`\log(1 + n)` of
      the number of such states before; for each kind :math:`\log(1 + \text{gap})` of
      the time since the last of them, or 0; and the message, for queries zeros,
    * :obj:`edge_index`, int64 :math:`[2, |\mathcal{E}|]`: edges from lower to higher
      numbers,
    * :obj:`edge_attr`, float :math:`[|\mathcal{E}|, 4]`: the kind, one-hot, and
      :math:`\log(1 + \text{gap})`, so that layers with :obj:`edge_dim=4` can forget by
      the time that has passed. As it tells only gaps apart that are not far below one,
      choose the unit of :obj:`t` below the shortest gap that matters,
    * :obj:`event_index`, int64 :math:`[2, E]`: the states of the source and of the
      destination of each event,
    * :obj:`query_index`, int64 :math:`[Q]`: the state of each query.

    Other attributes of the events, such as :obj:`y`, are kept. It takes as much time as
    sorting the events: those before :obj:`start`, too.

    With :obj:`start`, the DAG has the states of events from this number on, and of
    queries. The earlier states on which they depend come first, and no edges lead to
    them: :obj:`carried`, int64 :math:`[K]`, has their numbers in the DAG of the whole
    stream. See :meth:`RGLRUConv.resume <pyg_chimera.nn.RGLRUConv.resume>`.

    Shapes:
        - **input:** a :class:`torch_geometric.data.TemporalData` sorted by time:
          :obj:`src` and :obj:`dst`, integer :math:`(E)`, :obj:`t`, real :math:`(E)`,
          and :obj:`msg`, :math:`(E, M)` *(optional)*; queries *(optional)*, another of
          them, in any order, of which :obj:`src`, :obj:`dst` and :obj:`t` are read; and
          :obj:`start` *(optional)*, an integer
        - **output:** a :class:`torch_geometric.data.Data` of :math:`N = 2 E + Q`
          states

    Raises:
        TypeError: If the input is not :class:`~torch_geometric.data.TemporalData`, or
            nodes are not integers.
        ValueError: If an attribute is missing or has the wrong shape, times are not
            finite or not sorted, or a node is negative.

    Example:
        >>> events = TemporalData(
        ...     src=torch.tensor([0, 1]), dst=torch.tensor([1, 2]),
        ...     t=torch.tensor([10, 15]),
        ... )
        >>> query = TemporalData(
        ...     src=torch.tensor([0]), dst=torch.tensor([2]), t=torch.tensor([20])
        ... )
        >>> dag = EventsToDAG()(events, query)
        >>> dag.query_index.tolist(), dag.edge_index.tolist()
        ([4], [[1, 0, 1, 3], [2, 4, 3, 4]])
    """

    def __call__(
        self,
        data: TemporalData,
        queries: TemporalData | None = None,
        start: int | None = None,
    ) -> Data:
        """Converts a stream from its first event on, with queries, or a part of it."""
        ends, t, msg = _stream("events", data)
        if (late := (t[1:] < t[:-1]).nonzero()).numel():
            at = int(late[0])
            raise ValueError(
                f"'events.t' must be sorted, got {t[at].item()} before "
                f"{t[at + 1].item()} at place {at + 1}; sort events by "
                "'events[events.t.argsort(stable=True)]'"
            )
        if clash := [key for key in _RESERVED if key in data.to_dict()]:
            raise ValueError(f"'events' must not have {clash}, which the DAG will have")
        num_states = 2 * t.size(0)
        before = 2 * torch.arange(t.size(0), device=t.device).repeat_interleave(2)
        node, partner = ends.flatten(), ends.flip(1).flatten()
        t = t.repeat_interleave(2)
        if queries is not None:
            sought, when, _ = _stream("queries", queries, has_messages=False)
            if when.dtype != t.dtype:
                raise TypeError(
                    "'queries.t' and 'events.t' must both be integers, or neither, got "
                    f"{queries.t.dtype} and {data.t.dtype}"
                )
            before = torch.cat([before, torch.searchsorted(t, when)])
            t = torch.cat([t, when])
            node, partner = torch.cat([torch.stack([node, partner]), sought.t()], 1)

        # Numbers of nodes and of ordered pairs of them, from 0 without gaps.
        _, both = torch.stack([node, partner]).unique(return_inverse=True)
        node, partner = both
        _, pair = (node * both.numel() + partner).unique(return_inverse=True)
        x = msg.new_zeros(t.numel(), 2 + 2 * _KINDS + msg.size(1))
        x[0:num_states:2, 0] = x[1:num_states:2, 1] = x[num_states:, 0] = 1
        x[:num_states, 2 + 2 * _KINDS :] = msg.repeat_interleave(2, 0)
        edges, gaps = [], []
        keys = [(node, node), (node, partner), (pair, pair)]
        for kind, (of, wanted) in enumerate(keys):
            source, target, count = _last(of[:num_states], wanted, before)
            gap = (t[target] - t[source]).double().log1p().to(x)
            x[:, 2 + kind] = count.double().log1p().to(x)
            x[target, 2 + _KINDS + kind] = gap
            edges.append(torch.stack([source, target, torch.full_like(source, kind)]))
            gaps.append(gap)
        (source, target, kinds), gap = torch.cat(edges, 1), torch.cat(gaps)

        out, first = Data(), 0
        if start is not None:
            start = check_integer("start", start, 0)
            first = min(2 * start, num_states)
            new = target >= first
            source, target, kinds, gap = (y[new] for y in (source, target, kinds, gap))
            out.carried = source[source < first].unique()
            rest = torch.arange(first, t.numel(), device=t.device)
            states = torch.cat([out.carried, rest])
            source, target = (torch.searchsorted(states, y) for y in (source, target))
            x = x[states]
        for key, value in data.to_dict().items():
            if key not in ("src", "dst", "t", "msg"):
                of_events = getattr(value, "shape", ())[:1] == ends.shape[:1]
                out[key] = value[first // 2 :] if first and of_events else value
        out.x = x
        out.edge_index = torch.stack([source, target])
        out.edge_attr = torch.cat([F.one_hot(kinds, _KINDS).to(x), gap.unsqueeze(1)], 1)
        sizes = [num_states - first, t.numel() - num_states]
        states = torch.arange(x.size(0), device=t.device)[x.size(0) - sum(sizes) :]
        events, out.query_index = states.split(sizes)
        out.event_index = events.view(-1, 2).t()
        return out

    forward = __call__


def _stream(
    name: str, data: TemporalData, has_messages: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The checked ends [E, 2], times [E] and messages [E, M] of events."""
    if not isinstance(data, TemporalData):
        raise TypeError(
            f"'{name}' must be a 'torch_geometric.data.TemporalData', got "
            f"'{type(data).__name__}'"
        )
    for key in ("src", "dst", "t"):
        value = getattr(data, key, None)
        if not isinstance(value, Tensor) or value.dim() != 1 or value.is_complex():
            raise ValueError(
                f"'{name}.{key}' must be a tensor of real numbers of shape "
                f"[num_events], got {value}"
            )
        if value.dtype == torch.bool or (key != "t" and (value.is_floating_point())):
            what = "real numbers" if key == "t" else "integers, numbers of nodes"
            raise TypeError(f"'{name}.{key}' must be {what}, got {value.dtype}")
    src, dst, t = data.src, data.dst, data.t.contiguous()
    t = t.double() if t.is_floating_point() else t.long()  # gaps may be longer than t
    if not src.numel() == dst.numel() == t.numel():
        raise ValueError(
            f"'{name}' must have as many 'src' as 'dst' and 't', got {src.numel()}, "
            f"{dst.numel()} and {t.numel()}"
        )
    ends = torch.stack([src, dst], 1).long()
    if bool((ends < 0).any()):
        raise ValueError(
            f"'{name}.src' and 'dst' must be numbers of nodes, 0 or more, got "
            f"{int(ends.min())}"
        )
    if not bool(t.isfinite().all()):
        raise ValueError(f"'{name}.t' must be finite, got NaN or infinity")
    msg = getattr(data, "msg", None) if has_messages else None
    msg = t.new_zeros(t.numel(), 0, dtype=torch.float) if msg is None else msg
    if not isinstance(msg, Tensor):
        raise TypeError(f"'{name}.msg' must be a tensor, got '{type(msg).__name__}'")
    if msg.dim() == 0 or msg.size(0) != t.numel():
        raise ValueError(
            f"'{name}.msg' must have a row for each of {t.numel()} events, got shape "
            f"{list(msg.shape)}"
        )
    if msg.is_complex():
        raise TypeError(f"'{name}.msg' must be real, got {msg.dtype}")
    msg = msg.flatten(1) if msg.dim() > 1 else msg.unsqueeze(1)
    return ends, t, msg if msg.is_floating_point() else msg.float()


def _last(of: Tensor, wanted: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last state of each target's wanted key before a given state, if any.

    Args:
        of: What each state is of, integers from 0, [N].
        wanted: What each target wants, [T].
        before: The number of states to search for it, [T].

    Returns:
        tuple: Those states, their targets, both [E], and how many states there are for
        each target, [T].
    """
    size = of.numel() + 1
    key = (of * size + torch.arange(size - 1, device=of.device)).sort().values
    first = torch.searchsorted(key, wanted * size)
    end = torch.searchsorted(key, wanted * size + before)
    target = (end > first).nonzero().squeeze(1)
    return key[end[target] - 1] % size, target, end - first
