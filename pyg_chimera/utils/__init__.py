r"""Pictures of layers: the influence of nodes, and decompositions into DAGs.

Drawing needs matplotlib: ``pip install 'pyg-chimera[pictures]'``.
"""

from pyg_chimera.utils.influence import influence
from pyg_chimera.utils.plot import plot_dags, plot_influence

__all__ = ["influence", "plot_dags", "plot_influence"]
