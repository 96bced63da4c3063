class NotFiniteError(ValueError):
    """Raised if what a layer computes for an operator is NaN or infinite, of which the
    layer finds the cause.
    """


class CycleError(ValueError):
    """Raised if a graph that must be acyclic has a cycle.

    Args:
        cycle (list[int]): The nodes of one cycle, in the direction of its edges. A
            string is taken as the whole message, as workers of a
            :class:`torch.utils.data.DataLoader` re-raise errors.
    """

    def __init__(self, cycle: list[int] | str) -> None:
        self.cycle: list[int] = [] if isinstance(cycle, str) else cycle
        if isinstance(cycle, str):
            super().__init__(cycle)
            return
        if len(cycle) == 1:
            super().__init__(
                f"'edge_index' must be acyclic, but has a self-loop at node {cycle[0]}."
                " Remove such edges with 'torch_geometric.utils.remove_self_loops'."
            )
            return
        shown = [*cycle, cycle[0]] if len(cycle) <= 12 else [*cycle[:12], "..."]
        super().__init__(
            "'edge_index' must be acyclic, but has the cycle "
            + " -> ".join(map(str, shown))
            + ". Use what takes graphs with cycles, or make DAGs of the graph with "
            "'pyg_chimera.transforms.DAGDecomposition' and pass its lists to a layer "
            "with 'num_dags' (with order='auto', layers do so themselves where nothing "
            "is compiled; 'PLSTMConv' with order='bfs' also there)."
        )

    def __reduce__(self) -> tuple:
        return type(self), (str(self),), {"cycle": self.cycle}
