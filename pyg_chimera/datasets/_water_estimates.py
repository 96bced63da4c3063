r"""What the laws of flow say about the heads of a water network, without learning.

If flows through pipes were weights :math:`w_{ij}` times differences of heads, and
:math:`d_i` is what node i consumes,

.. math::
    h_i = \sum_j A_{ij} h_j - d_i / \sum_j w_{ij}, \quad
    A_{ij} = w_{ij} / \sum_k w_{ik},

so that heads are :math:`\mathbf{R} \mathbf{z}` with :math:`\mathbf{R} = (\mathbf{I} -
\mathbf{A})^{-1}`, the resolvent that layers learn. Where the inflow is unknown, the row
of :math:`\mathbf{A}` is zero, and the head itself is the input :math:`z_i`.

Inputs are taken for Gaussian, with the mean :math:`\boldsymbol\mu` and the covariance
:math:`\mathbf{V}`. If sensors, rows :math:`\mathbf{R}_S`, measure :math:`\mathbf{y}`
with a deviation :math:`\epsilon`, they are expected to be

.. math::
    \boldsymbol\mu + \mathbf{V} \mathbf{R}_S^\top (\mathbf{R}_S \mathbf{V}
    \mathbf{R}_S^\top + \epsilon^2 \mathbf{I})^{-1} (\mathbf{y} - \mathbf{R}_S
    \boldsymbol\mu),

which is also the solution of weighted least squares. As flows grow more slowly than
differences of heads, weights are the ratios of both at the heads found before.
"""

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import one_hot, scatter

from pyg_chimera.ops import solve
from pyg_chimera.ops.structure import connected_components

#: What is lost at each step, so that parts without sensors have a solution.
LEAK = 1e-12
#: Flows are in proportion to the head that is lost below so many metres: more in the
#: first of the rounds, whose heads are a guess.
SMOOTH = 0.3, *5 * (0.003,)
#: Up to this factor, the last change of what is lost is extrapolated.
MOST_CHANGE = 3.0
#: Deviations: of what sensors measure, in metres; of demands from the base ones, each
#: by itself, relative and in mean demands, and all together; and of heads where no
#: balance is known, in the deviation of the sensors and at least in metres.
SENSOR_SIGMA, OWN_SIGMA, MEAN_SIGMA, FACTOR_SIGMA = 0.01, 0.5, 0.02, 0.3
LOOSE_SIGMA, LOOSE_METRES = 2.0, 20.0
#: The number of random states by which the spread is found, and the least spread, in
#: the deviation of the sensors.
DRAWN, LEAST_SPREAD = 16, 0.003


def _is_pipe(data: Data) -> Tensor:
    """Which edges are pipes in both directions: no pump, valve or check valve."""
    return (data.edge_attr[:, 3] == 1) & (data.edge_attr[:, 6] == 0)


def in_zone(data: Data) -> Tensor:
    """Which nodes pipes connect with a sensor."""
    pipes = data.edge_index[:, _is_pipe(data)]
    zone = connected_components(pipes, data.num_nodes)
    return torch.isin(zone, zone[data.sensor_mask])


def _shares(data: Data, weight: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of each edge over the sum at its target, zero where the value is
    given, and the sums [V].
    """
    target = data.edge_index[1]
    total = scatter(weight, target, dim_size=data.num_nodes).clamp(min=1e-12)
    return (1 - LEAK) * weight / total[target] * ~given[target], total


def _mix(data: Data, share: Tensor, inputs: Tensor, back: bool = False) -> Tensor:
    """Values [V, k] that are inputs plus means of neighbours; with `back`, those by the
    transposed system.
    """
    edge_index = data.edge_index.flip(0) if back else data.edge_index
    rank = data.elimination_rank if "elimination_rank" in data else None
    return solve(edge_index, share, inputs, rank=rank)


def interpolate(data: Data, heads: Tensor) -> Tensor:
    """Harmonic interpolation of heads [V], zero where no sensor is."""
    share, _ = _shares(data, data.conductance.double(), data.sensor_mask)
    inputs = torch.stack([heads, data.sensor_mask.double()], dim=1)
    heads, kept = _mix(data, share, inputs).unbind(1)
    return heads / kept.clamp(min=0.5)  # what did not leak: almost one, or no sensor


def estimate(data: Data, heads: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Heads and their deviation [V], by least squares, from the heads of sensors, zero
    elsewhere, and a guess; all in units of the deviation of the sensors.
    """
    target = data.edge_index[1]
    scale, demand = data.sensor_scale[0].double(), data.demand.double()
    sensors = data.sensor_mask.nonzero().view(-1)
    unit = one_hot(sensors, num_classes=data.num_nodes, dtype=torch.double).T
    is_pipe = _is_pipe(data)
    loose = torch.ones_like(data.sensor_mask)  # no balance is known
    loose[target[is_pipe]] = False
    loose[target[~is_pipe]] = True
    loose |= data.node_type > 0
    own = OWN_SIGMA * demand.abs() + MEAN_SIGMA * demand.abs().mean()
    loose_sigma = (LOOSE_METRES / scale).clamp(min=LOOSE_SIGMA)
    power = float(data.flow_power)
    found, noise = guess, SENSOR_SIGMA / scale
    before = _lost(scale * found, data.edge_index, SMOOTH[0])
    for smooth in SMOOTH:
        lost = _lost(scale * found, data.edge_index, smooth)
        # Where a flow is given, a round leaves 1 - power of the logarithm's error: so
        # half of what would still follow is added.
        change = (lost / before).clamp(1 / MOST_CHANGE, MOST_CHANGE)
        lost = before = lost * change ** ((1 - power) / (2 * power))
        weight = data.conductance * is_pipe * lost ** (power - 1)
        share, total = _shares(data, weight, loose)
        drawn_off = torch.where(loose, 0, -demand / (scale * total))
        mean = torch.where(loose, guess, drawn_off)[:, None]
        # Heads follow demands by 1 / power times what weights say, as flows have slopes
        # of power times weights: here, variances are divided by power, as the heads
        # found are by weights, and by its square for the deviation of heads below.
        steep = torch.where(loose, 1, power**-0.5)[:, None]
        deviation = torch.where(loose, loose_sigma, own / (scale * total))[:, None]
        deviation, common = steep * deviation, steep * FACTOR_SIGMA * drawn_off[:, None]
        reads = _mix(data, share, unit, back=True).T
        misses = heads[sensors, None] - reads @ mean
        explained = _explain(deviation, common, reads, noise, misses)
        found = _mix(data, share, mean + explained)[:, 0]
    left = _left(steep * deviation, steep * common, reads, noise)
    spread = _mix(data, share, left).square().mean(dim=1).sqrt()
    return found, spread + LEAST_SPREAD


def _lost(heads: Tensor, edge_index: Tensor, smooth: float) -> Tensor:
    """The head that is lost along each edge, in metres, at least `smooth`."""
    source, target = edge_index
    return ((heads[source] - heads[target]).square() + smooth**2).sqrt()


def _explain(
    deviation: Tensor, common: Tensor, reads: Tensor, noise: Tensor, misses: Tensor
) -> Tensor:
    """The expected deviation of inputs [V, k] from their mean, if what sensors read of
    them [S, V] misses so much [S, k] of what they measure, with noise. Inputs have
    deviations of their own [V, 1] and a common one [V, 1].
    """

    def covary(x: Tensor) -> Tensor:
        return deviation**2 * x + common @ (common.T @ x)

    covariance = reads @ covary(reads.T)
    covariance.diagonal().add_(noise**2)
    return covary(reads.T @ torch.linalg.solve(covariance, misses))


def _left(deviation: Tensor, common: Tensor, reads: Tensor, noise: Tensor) -> Tensor:
    """Random deviations of inputs, always the same, less those expected if sensors
    measure what follows from them: what sensors leave open, [V, DRAWN].
    """
    rng = torch.Generator().manual_seed(0)
    sizes = (len(deviation), 1, len(reads))
    random = torch.randn(sum(sizes), DRAWN, generator=rng, dtype=torch.double)
    each, together, measured = random.split(sizes)
    drawn = deviation * each + common * together
    misses = reads @ drawn + noise * measured
    return drawn - _explain(deviation, common, reads, noise, misses)
