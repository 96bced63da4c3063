"""Heads in water networks, to be found from a few sensors."""

import gzip
import logging
import os.path as osp
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from hashlib import sha256
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import one_hot, scatter
from tqdm import trange

from pyg_chimera.datasets._common import atomic_path, no_bars
from pyg_chimera.datasets._water_estimates import estimate, in_zone, interpolate
from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.checks import check_integer, check_number
from pyg_chimera.ops.common.optional import required
from pyg_chimera.ops.structure import connected_components
from pyg_chimera.transforms.line_graph import LineGraphData

__all__ = ["SampleSensors", "WaterNetworks"]

#: Elevations in metres are divided by this in the inputs of models.
ELEVATION_SCALE = 10.0
#: Heads are divided by their deviation at sensors, of at least so many metres.
LEAST_SCALE = 0.5
#: Units of conductance (m³/s at a loss of 1 m), length and diameter (m) in `edge_attr`.
UNITS = (0.01, 100.0, 0.2)
#: The conductance of a pump or a valve, in that of the median pipe.
JUMP = 1e-3
#: The ranges that states are drawn from.
DEMAND_SIGMA, DEMAND_FACTOR, SOURCE_METRES = 0.5, (0.4, 1.4), 2.0
#: Lower pressures, in metres, are no result.
LOWEST_PRESSURE = -200.0
#: How often states are drawn again, if most are dropped.
TRIES = 20
#: Flows grow with this power of the head that is lost, by formula.
FLOW_POWER = {"H-W": 1 / 1.852, "C-M": 0.5, "D-W": 0.5}
GRAVITY, VISCOSITY = 9.81, 1.0e-6


class SampleSensors(BaseTransform):
    r"""Chooses junctions that have sensors, and makes the inputs of a model from what
    these measure: no other head is in them. Heads may be NaN where none is known. So
    :obj:`SampleSensors(1)` estimates all heads from those that were measured.

    Sets the attributes, for heads :obj:`y` :math:`\mathbf{h}` with the mean
    :math:`\bar h` and the standard deviation :math:`\sigma` over the sensors,

    * :obj:`sensor_mask`: bool :math:`(V)`, the junctions with sensors,
    * :obj:`target_mask`: bool :math:`(V)`, the junctions without whose head is known,
    * :obj:`sensor_mean`: float32 :math:`(V)`, :math:`\bar h` in metres, at each node of
      a graph the same, and :obj:`sensor_scale`, :math:`\sigma`, at least 0.5 m,
    * :obj:`harmonic`: float32 :math:`(V)`, harmonic interpolation of
      :math:`(h_i - \bar h) / \sigma`: each value is the mean of its neighbours',
      weighted by conductance; zero in parts without sensors,
    * :obj:`start`: float32 :math:`(V)`, :math:`\mathbf{s}`, an estimate of the same by
      least squares, see below,
    * :obj:`spread`: float32 :math:`(V)`, :math:`\mathbf{w}`, the deviation of the
      estimate in units of :math:`\sigma`, found by 16 random states, plus 0.003,
    * :obj:`in_zone`: bool :math:`(V)`, whether pipes lead to a sensor, without pumps,
      valves or check valves,
    * :obj:`x`: float32 :math:`(V, 9)`: :math:`(h_i - \bar h) / \sigma` at sensors and
      zero elsewhere; one at sensors; the elevation, :math:`(e_i - \bar h) / 10`; the
      base demand :math:`d_i` as :math:`\mathrm{arsinh}(d_i / \bar d)`, where
      :math:`\bar d` is the mean of their absolute values; junction, tank and reservoir
      as one-hot; :math:`s_i`; :math:`\log w_i`.

    A model whose output is :math:`\mathbf{o}` predicts the heads :math:`\bar h +
    \sigma (\mathbf{s} + \mathbf{w} \odot \mathbf{o})` in metres: networks differ in
    heads by 1 to 50 m, and unseen ones would otherwise have inputs that no other has.

    The estimate is the state estimation of hydraulics. Demands are taken to deviate
    from the base ones by 50 % and by 2 % of the mean one, each by itself, and by 30 %,
    all together; sensors by 1 cm; and heads of tanks, reservoirs and the ends of pumps,
    valves and check valves, whose inflow is unknown, from interpolation by
    :math:`2 \sigma`, or 20 m if this is more. Of all heads, the estimate has those with
    the least sum of squares of deviations in these units, but for rounds that are not
    iterated to the end. Heads of tanks and reservoirs are not read. It takes 14
    solutions of sparse systems, which need no order of their own if the graph has an
    :obj:`elimination_rank`. Reads :obj:`edge_index`, :obj:`conductance`,
    :obj:`edge_attr`, :obj:`demand`, :obj:`flow_power`, :obj:`node_type`,
    :obj:`elevation` and :obj:`y` as :class:`WaterNetworks` makes them.

    Args:
        share (float, optional): The share of the junctions whose head is known that
            have a sensor; at least one has. (default: :obj:`0.05`)
        seed (int, optional): If given, each state of a network has its own sensors,
            always the same, as for validation and tests. With :obj:`None`, they are
            drawn anew each time, by PyTorch's generator. (default: :obj:`None`)

    Raises:
        ValueError: If the share is not in (0, 1], the seed is negative, or no head of a
            junction is known.
    """

    def __init__(self, share: float = 0.05, seed: int | None = None) -> None:
        check_number("share", share)
        if not 0 < share <= 1:
            raise ValueError(f"'share' must be in (0, 1], got {share}")
        self.share = share
        self.seed = None if seed is None else check_integer("seed", seed, 0)

    def forward(self, data: Data) -> Data:
        """Sets the sensors of a graph, and the attributes that follow from them."""
        known = (data.node_type == 0) & ~data.y.isnan()
        junctions = known.nonzero().view(-1)
        if len(junctions) == 0:
            raise ValueError("'data.y' must have the head of at least one junction")
        count = max(1, round(self.share * len(junctions)))
        if self.seed is None:
            order = torch.randperm(len(junctions), device="cpu")
        else:
            state = int(data.get("state", 0))
            rng = np.random.default_rng([self.seed, state, len(junctions)])
            order = torch.from_numpy(rng.permutation(len(junctions)))
        sensors = torch.zeros_like(known)
        sensors[junctions[order[:count]]] = True
        measured = data.y[sensors].double()
        mean = measured.mean().float()
        scale = measured.std(correction=0).clamp(min=LEAST_SCALE).float()
        demand = data.demand / data.demand.abs().mean().clamp(min=1e-12)
        heads = ((data.y - mean) / scale).where(sensors, 0.0)
        data.sensor_mask = sensors
        data.target_mask = known & ~sensors
        data.sensor_mean = mean.repeat(data.num_nodes)
        data.sensor_scale = scale.repeat(data.num_nodes)
        data.in_zone = in_zone(data)
        harmonic = interpolate(data, heads.double())
        start, spread = estimate(data, heads.double(), harmonic)
        data.harmonic, data.start = harmonic.float(), start.float()
        data.spread = spread.float()
        columns = [
            heads,
            sensors.float(),
            (data.elevation - mean) / ELEVATION_SCALE,
            demand.asinh(),
            *one_hot(data.node_type, num_classes=3).unbind(dim=1),
            data.start,
            data.spread.log(),
        ]
        data.x = torch.stack(columns, dim=1)
        return data

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.share}, seed={self.seed})"


class WaterNetworks(Dataset):
    r"""States of water distribution networks: the heads at all junctions are to be
    found from sensors at a few, as in `"Reconstructing nodal pressures in water
    distribution systems with graph neural networks"
    <https://arxiv.org/abs/2104.13619>`_.

    The networks are files of EPANET (:obj:`.inp`, plain or compressed as
    :obj:`.inp.gz`), read by the package `wntr <https://usepa.github.io/WNTR>`_, which
    some come with. States are steady states by EPANET's own library, 10 ms each for
    1,000 nodes:

    * demands of junctions are log-normal around those of the file, averaged over a day
      (:math:`\sigma = 0.5`), times one factor for the network, uniform in [0.4, 1.4],
    * levels of tanks are uniform between their minimum and maximum,
    * heads of reservoirs differ from those of the file by up to 2 m, uniformly.

    The controls and rules of the file do not act: links are open or closed as it
    states, apart from check valves, control valves and pumps at their limits. States
    that EPANET fails to solve or warns of (not balanced, disconnected, pumps or valves
    out of their range, negative pressures where there is demand) are dropped, as are
    those with a pressure below -200 m, and others drawn in their place; :obj:`dropped`
    counts them. So networks whose supply is scarce keep states of small demand.

    Each file is processed once, and kept with the graph once for all its states. Nodes
    are junctions, tanks and reservoirs, edges are pipes, pumps and valves, each in both
    directions. Closed links are left out, and nodes that no source supplies without
    them.

    The item :obj:`i * num_states + s` is state :obj:`s` of network :obj:`i`, with the
    attributes that :class:`SampleSensors` sets, and

    * :obj:`edge_index`: int64 :math:`(2, E)`; edge :math:`e + E / 2` is edge :math:`e`
      backwards,
    * :obj:`edge_attr`: float32 :math:`(E, 7)`, natural logarithms of the conductance in
      10 L/s, of the length in 100 m and of the diameter in 0.2 m (zero where there is
      none: pumps have only the rest), pipe, pump and valve as one-hot, and for links
      that work in one direction (pumps, valves, check valves) 1 along it and -1 against
      it,
    * :obj:`conductance`: float32 :math:`(E)`, the flow in m³/s at which a pipe loses
      1 m of head; at pumps and valves, where heads may jump, a thousandth of the median
      of the pipes,
    * :obj:`flow_power` (float): flows grow with this power of the head lost,
    * :obj:`elevation`: float32 :math:`(V)`, in metres; of reservoirs, which have none,
      the mean of their neighbours,
    * :obj:`demand`: float32 :math:`(V)`, that of the file in m³/s, averaged over a day,
    * :obj:`node_type`: int64 :math:`(V)`, 0 for junctions, 1 tanks and 2 reservoirs,
    * :obj:`pos`: float32 :math:`(V, 2)`, coordinates in units of the file, NaN where it
      has none,
    * :obj:`y`: float32 :math:`(V)`, the heads in metres,
    * :obj:`name` (str), that of the file, and :obj:`state` (int).

    Conductances follow from the formula that the file chooses: that of Hazen and
    Williams, :math:`h = 10.67\, L\, C^{-1.852} d^{-4.871} Q^{1.852}`, of Chezy and
    Manning, :math:`h = 10.29\, n^2 L\, d^{-5.333} Q^2`, or of Darcy and Weisbach,
    solved for the flow by `Swamee and Jain (1976)
    <https://doi.org/10.1061/JYCEAJ.0004542>`_ at 20 °C.

    No network is part of this package. Those of `wntr` are anonymised (Kentucky:
    :obj:`"ky4"`, :obj:`"ky10"`) or EPANET's examples (:obj:`"Net1"`, :obj:`"Net2"`,
    :obj:`"Net3"`, :obj:`"Net6"`), under its Revised BSD License. For other files, heed
    their own terms.

    Args:
        root (str): Folder for processed files.
        networks (Sequence[str]): Paths of files, or names of networks of `wntr`.
        num_states (int, optional): The number of states of each network. (default:
            :obj:`200`)
        sensors (float or SampleSensors, optional): The share of the junctions with
            sensors, which are drawn each time that an item is read, or how they are
            chosen. For validation and tests, pass
            :obj:`SampleSensors(0.05, seed=0)`. (default: :obj:`0.05`)
        seed (int, optional): Seed of the states. (default: :obj:`0`)
        transform (callable, optional): As in
            :class:`~torch_geometric.data.Dataset`, with sensors.
        pre_transform (callable, optional): Applied once to the graph of each network,
            which has neither heads nor sensors, such as
            :class:`~pyg_chimera.transforms.AddEliminationOrder`. It may renumber nodes
            or leave some out. Files are told apart by what it prints.
        force_reload (bool, optional): Whether to process the files again.
            (default: :obj:`False`)

    Raises:
        ImportError: If files are to be processed, or names to be looked up, without
            `wntr` (:obj:`pip install pyg-chimera[water]`).
        FileNotFoundError: If a network is neither a file nor known to `wntr`.
        ValueError: If an argument is out of range, a file has no junction that a source
            supplies, or EPANET solves too few of its states; if :obj:`pre_transform`
            does not print as what it does, as lambdas, adds nodes, or loses their
            attributes.
    """

    def __init__(
        self,
        root: str,
        networks: Sequence[str],
        num_states: int = 200,
        sensors: float | SampleSensors = 0.05,
        seed: int = 0,
        transform: Callable | None = None,
        pre_transform: Callable | None = None,
        force_reload: bool = False,
    ) -> None:
        if isinstance(networks, str) or len(networks) == 0:
            raise ValueError(
                f"'networks' must be a list of at least one network, got {networks!r}"
            )
        if re.search("<lambda>|<locals>| object at 0x", repr(pre_transform)):
            raise ValueError(
                "'pre_transform' must print as what it does, by which files are told "
                f"apart, such as a function of a module, got {pre_transform}"
            )
        self.num_states = check_integer("num_states", num_states, 1)
        self.seed = check_integer("seed", seed, 0)
        if not isinstance(sensors, SampleSensors):
            sensors = SampleSensors(sensors)
        self.sensors = sensors
        self.paths = [_find(str(network)) for network in networks]
        self._digests = [_digest(path) for path in self.paths]
        with warnings.catch_warnings():  # its files have other names
            warnings.filterwarnings("ignore", "The `pre_transform` argument differs")
            super().__init__(root, transform, pre_transform, force_reload=force_reload)
        #: For each network, the graph, without heads, and its heads [V, states].
        self.graphs: list[Data] = []
        self.heads: list[Tensor] = []
        #: For each network, the names of the graph's nodes.
        self.node_names: list[list[str]] = []
        #: How many states of each network were dropped.
        self.dropped: dict[str, int] = {}
        for path in self.processed_paths:
            is_line, graph, names, heads, dropped = torch.load(path, weights_only=True)
            self.node_names.append(names)
            self.graphs.append((LineGraphData if is_line else Data).from_dict(graph))
            self.heads.append(heads)
            self.dropped[graph["name"]] = dropped

    @property
    def processed_file_names(self) -> list[str]:
        """A file for each network, named by what it depends on."""
        made = ""
        if self.pre_transform is not None:
            text = re.sub(r" at 0x[0-9a-f]+", "", repr(self.pre_transform))
            made = "-" + sha256(text.encode()).hexdigest()[:8]
        return [
            f"{_name(path)}-{digest}-{self.num_states}-seed{self.seed}{made}-v3.pt"
            for path, digest in zip(self.paths, self._digests, strict=True)
        ]

    def process(self) -> None:
        """Draws the states of those networks that are not processed yet."""
        files = zip(self.paths, self._digests, self.processed_paths, strict=True)
        for path, digest, out in files:
            if osp.exists(out) and not self.force_reload:
                continue
            rng = np.random.default_rng([self.seed, int(digest, 16)])
            with TemporaryDirectory() as folder:
                network = _read(path, folder)
                heads, dropped = _solve(network, self.num_states, rng, no_bars(self))
            graph = network.graph
            names = [network.names[i] for i in network.kept]
            if self.pre_transform is not None:
                graph, node = _transformed(graph, self.pre_transform)
                names, heads = [names[i] for i in node.tolist()], heads[node]
            is_line = isinstance(graph, LineGraphData)
            with atomic_path(out) as part:
                torch.save((is_line, graph.to_dict(), names, heads, dropped), part)

    def len(self) -> int:
        """The number of states of all networks."""
        return len(self.graphs) * self.num_states

    def get(self, idx: int) -> Data:
        """A state, with its sensors."""
        number, state = divmod(idx, self.num_states)
        data = copy(self.graphs[number])
        data.y = self.heads[number][:, state].clone()
        data.state = state
        return self.sensors(data)


def _transformed(graph: Data, transform: Callable) -> tuple[Data, Tensor]:
    """The transformed graph, and which of the nodes it has, in its order."""
    graph.n_id = torch.arange(graph.num_nodes)
    graph = transform(graph)
    node = getattr(graph, "n_id", None)
    if node is None or len(node) != graph.num_nodes or len(node.unique()) < len(node):
        raise ValueError(
            "'pre_transform' must keep attributes of nodes, such as 'n_id' [V], by "
            f"which heads are known, and add no nodes, got {graph}"
        )
    del graph["n_id"]
    return graph, node


# Files -------------------------------------------------------------------------------


_wntr = partial(required, "wntr", "'WaterNetworks'", "water")


def _name(path: str) -> str:
    return osp.basename(path).removesuffix(".gz").removesuffix(".inp")


def _content(path: str) -> bytes:
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        return file.read()


def _digest(path: str) -> str:
    return sha256(_content(path)).hexdigest()[:10]


def _find(network: str) -> str:
    """The path of a network, given or known to `wntr`."""
    if osp.isfile(network):
        return network
    if network != _name(network):
        raise FileNotFoundError(
            f"There is no file {network}: pass the path of an .inp file of EPANET"
        )
    library = _wntr().library.ModelLibrary()
    if network not in library.model_name_list:
        raise FileNotFoundError(
            f"There is no network {network!r}: pass the path of an .inp file of "
            f"EPANET, or one of those of wntr, {sorted(library.model_name_list)}"
        )
    return library.get_filepath(network)


class _Network(NamedTuple):
    """A network as EPANET reads it, and its graph. Lengths are in metres."""

    path: str  #: of a file in units of L/s, without controls
    names: list[str]  #: of all nodes of the file
    kept: np.ndarray  #: which of them are nodes of the graph, [V]
    graph: Data


def _read(path: str, folder: str) -> _Network:
    """Reads a file, and writes it again as the states need it."""
    wntr = _wntr()
    plain = osp.join(folder, "read.inp")
    with open(plain, "wb") as file:
        file.write(_content(path))
    with _quiet():
        model = wntr.network.WaterNetworkModel(plain)
        expected = wntr.metrics.average_expected_demand(model)
        for name in list(model.control_name_list):
            model.remove_control(name)
        # One demand for each junction, in place of several with patterns.
        model.add_pattern("unchanged", [1.0])
        for name, junction in model.junctions():
            junction.demand_timeseries_list.clear()
            junction.add_demand(float(expected[name]), "unchanged")
        model.options.hydraulic.demand_multiplier = 1.0
        model.options.time.pattern_start = 0
        written = osp.join(folder, "written.inp")
        wntr.network.write_inpfile(model, written, units="LPS")
    names = list(model.node_name_list)
    kept, graph = _graph(model, names, expected, _name(path))
    return _Network(written, names, kept, graph)


def _graph(
    model: Any, names: list[str], expected: Any, title: str
) -> tuple[np.ndarray, Data]:
    """The nodes that are supplied, and the graph of open links between them."""
    index = {name: i for i, name in enumerate(names)}
    nodes = [model.get_node(name) for name in names]
    kinds = ["Junction", "Tank", "Reservoir"]
    node_type = np.array([kinds.index(node.node_type) for node in nodes])
    links = [link for _, link in model.links() if link.initial_status.name != "Closed"]
    ends = np.array(
        [(index[x.start_node_name], index[x.end_node_name]) for x in links], int
    ).reshape(-1, 2)
    part = as_array(connected_components(torch.from_numpy(ends.T), len(names)))
    supplied = np.isin(part, part[node_type > 0])
    if not (supplied & (node_type == 0)).any():
        raise ValueError(
            f"'networks': no open link leads from a tank or reservoir to a junction of "
            f"{title}, so it has no heads"
        )
    kept = np.flatnonzero(supplied)
    links = [x for x, end in zip(links, ends, strict=True) if supplied[end[0]]]
    ends = np.searchsorted(kept, ends[supplied[ends[:, 0]]])

    formula = model.options.hydraulic.headloss
    rows = np.array([_describe(link, formula) for link in links]).reshape(-1, 7)
    pipe = rows[:, 3] == 1
    typical = np.median(rows[pipe, 0]) if pipe.any() else UNITS[0]
    conductance = np.where(pipe, rows[:, 0], JUMP * typical)
    rows[:, :3] = np.log(rows[:, :3] / UNITS)
    edge_attr = torch.from_numpy(rows).repeat(2, 1)
    edge_attr[len(links) :, 6] *= -1
    one_way = torch.from_numpy(ends.T.copy()).long()
    edge_index = torch.cat([one_way, one_way.flip(0)], dim=1)

    nodes = [nodes[i] for i in kept]
    types = torch.from_numpy(node_type[kept])
    heights = torch.tensor([getattr(x, "elevation", 0.0) for x in nodes]).double()
    source, target = edge_index[:, types[edge_index[0]] < 2]
    around = scatter(heights[source], target, dim_size=len(nodes), reduce="mean")
    pos = torch.tensor([x.coordinates for x in nodes]).float().view(-1, 2)
    demand = [float(expected.get(names[i], 0.0)) for i in kept]
    return kept, Data(
        edge_index=edge_index,
        edge_attr=edge_attr.float(),
        conductance=torch.from_numpy(conductance).repeat(2).float(),
        elevation=torch.where(types == 2, around, heights).float(),
        demand=torch.tensor(demand).float(),
        node_type=types,
        pos=pos if pos.any() else pos * torch.nan,
        num_nodes=len(nodes),
        flow_power=FLOW_POWER[formula],
        name=title,
    )


def _describe(link: Any, formula: str) -> list[float]:
    """Conductance, length, diameter, whether pipe, pump or valve, and direction."""
    kind = link.link_type
    diameter = getattr(link, "diameter", UNITS[2])
    kinds = [float(kind == name) for name in ("Pipe", "Pump", "Valve")]
    if kind != "Pipe":
        return [*UNITS[:2], diameter or UNITS[2], *kinds, 1.0]
    flow = _flow(formula, link.length, diameter, link.roughness)
    return [flow, link.length, diameter, *kinds, float(link.check_valve)]


def _flow(formula: str, length: float, diameter: float, roughness: float) -> float:
    """The flow in m³/s at which a pipe loses a metre, in SI units."""
    if formula == "H-W":
        loss = 10.67 * length * roughness**-1.852 * diameter**-4.871
        return loss ** (-1 / 1.852)
    if formula == "C-M":
        return (10.29 * roughness**2 * length) ** -0.5 * diameter**2.6667
    slope = GRAVITY * diameter / length
    rough = roughness / (3.7 * diameter)
    smooth = 1.78 * VISCOSITY / (diameter * slope**0.5)
    return -0.965 * diameter**2 * slope**0.5 * float(np.log(rough + smooth))


# States ------------------------------------------------------------------------------


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what `wntr` says about each file and each state."""
    loggers = [logging.getLogger(f"wntr{x}") for x in ("", ".epanet", ".network")]
    loggers += [logging.getLogger(f"wntr.epanet.{x}") for x in ("toolkit", "io")]
    before = [x.level for x in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _solve(
    network: _Network, num_states: int, rng: np.random.Generator, no_bar: bool | None
) -> tuple[Tensor, int]:
    """Heads [V, states] in metres, and how many states were dropped."""
    _wntr()
    from wntr.epanet.exceptions import EpanetException
    from wntr.epanet.toolkit import ENepanet
    from wntr.epanet.util import EN

    graph, folder = network.graph, osp.dirname(network.path)
    epanet = ENepanet(network.path, osp.join(folder, "rpt"), osp.join(folder, "bin"))
    heads: list[np.ndarray] = []
    tries = 0
    with _quiet():
        epanet.ENopen()
        number = [epanet.ENgetnodeindex(network.names[i]) for i in network.kept]

        def values(which: Any, code: int) -> np.ndarray:
            return np.array([epanet.ENgetnodevalue(number[i], code) for i in which])

        types = as_array(graph.node_type)
        junctions, tanks, reservoirs = (np.flatnonzero(types == x) for x in range(3))
        base = values(junctions, EN.BASEDEMAND)
        low, high = values(tanks, EN.MINLEVEL), values(tanks, EN.MAXLEVEL)
        sources = values(reservoirs, EN.ELEVATION)
        elevation = as_array(graph.elevation)[junctions]

        def draw() -> np.ndarray | None:
            """The heads of a random state, None if it is to be dropped."""
            factor = rng.uniform(*DEMAND_FACTOR)
            demand = factor * base * rng.lognormal(0, DEMAND_SIGMA, len(base))
            shift = rng.uniform(-SOURCE_METRES, SOURCE_METRES, len(sources))
            for which, code, drawn in (
                (junctions, EN.BASEDEMAND, demand),
                (tanks, EN.TANKLEVEL, rng.uniform(low, high)),
                (reservoirs, EN.ELEVATION, sources + shift),
            ):
                for i, value in zip(which, drawn, strict=True):
                    epanet.ENsetnodevalue(number[i], code, float(value))
            try:
                epanet.ENinitH(10)  # flows start anew: no state depends on the last
                epanet.ENrunH()
            except EpanetException:
                return None
            if epanet.errcode != 0:  # a warning; the next call replaces it
                return None
            found = values(range(len(number)), EN.HEAD)
            lowest = (found[junctions] - elevation).min()
            fine = np.isfinite(found).all() and lowest > LOWEST_PRESSURE
            return found if fine else None

        try:
            epanet.ENopenH()
            for _ in trange(num_states, desc=graph.name, disable=no_bar):
                state = None
                while state is None:
                    if tries == TRIES * num_states:
                        raise ValueError(
                            f"'networks': EPANET solves only {len(heads)} of {tries} "
                            f"states of {graph.name} without a warning. Check its "
                            "demands and pumps, or leave it out"
                        )
                    state, tries = draw(), tries + 1
                heads.append(state)
            epanet.ENcloseH()
        finally:
            epanet.ENclose()
    stacked = torch.from_numpy(np.stack(heads, axis=1)).float()
    return stacked, tries - num_states
