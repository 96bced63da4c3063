"""Nodes that are structurally alike: the coarsest equitable partition of a graph."""

import numpy as np

from pyg_chimera.ops.common.compilation import compiled


@compiled()
def equitable_partition(ptr, head, bounds):
    """The coarsest equitable partition of each graph.

    All nodes of a cell have the same number of neighbours in each cell, and thus the
    same centralities. Computed on cells, scores of symmetric nodes are equal to the
    last bit, and eigenvectors in which they differ do not occur. Cells are numbered
    independently of the node numbers, so scores do not depend on these, not even by
    rounding.

    By `"Tight Lower and Upper Bounds for the Complexity of Canonical Colour
    Refinement" <https://arxiv.org/abs/1509.08251>`_, in O(E log V) time.

    Returns:
        The cell of each node, the size of each cell, the first cell of each graph, and
        the neighbours of each cell: their bounds (like `ptr`), the cells, ascending
        (like `head`), and how many neighbours each node of the cell has there.
    """
    n = ptr.shape[0] - 1
    node = np.arange(n)  # the nodes, cell by cell
    place = np.arange(n)  # the index of each node in `node`
    cell = np.empty(n, np.int64)
    first = np.empty(n, np.int64)
    size = np.zeros(n, np.int64)
    number = np.zeros(n, np.int64)  # of neighbours in the refining cell
    touched = np.empty(n, np.int64)
    queue = np.empty(n, np.int64)
    queued = np.zeros(n, np.bool_)
    limits = np.zeros(bounds.shape[0], np.int64)
    num_cells = 0
    for g in range(bounds.shape[0] - 1):
        low, high = bounds[g], bounds[g + 1]
        begin = end = 0  # of the queue, which holds each cell at most once
        if low < high:
            cell[low:high] = num_cells
            first[num_cells], size[num_cells] = low, high - low
            queue[0] = num_cells
            queued[num_cells] = True
            end = 1
            num_cells += 1
        while begin < end:
            c = queue[begin % n]
            queued[c] = False
            begin += 1
            num_touched = 0
            for p in range(first[c], first[c] + size[c]):
                for x in range(ptr[node[p]], ptr[node[p] + 1]):
                    if number[head[x]] == 0:
                        touched[num_touched] = head[x]
                        num_touched += 1
                    number[head[x]] += 1
            key = np.empty(num_touched, np.int64)
            for t in range(num_touched):
                key[t] = cell[touched[t]] * n + number[touched[t]]
            order = np.argsort(key)
            t = 0
            while t < num_touched:
                c = cell[touched[order[t]]]
                after = t + 1
                while after < num_touched and key[order[after]] // n == c:
                    after += 1
                # The nodes with the most neighbours move to the end of their cell and
                # become new cells; those with the fewest stay.
                stop = first[c] + size[c]
                old = num_cells
                if after - t < size[c] or key[order[t]] < key[order[after - 1]]:
                    for s in range(after - 1, t - 1, -1):
                        stop -= 1
                        i, j = touched[order[s]], node[stop]
                        node[place[i]], place[j] = j, place[i]
                        node[stop], place[i] = i, stop
                    for s in range(t, after):
                        if stop + s - t == first[c]:
                            continue
                        if s == t or key[order[s]] != key[order[s - 1]]:
                            first[num_cells], size[num_cells] = stop + s - t, 0
                            num_cells += 1
                        if num_cells > old:
                            cell[touched[order[s]]] = num_cells - 1
                            size[num_cells - 1] += 1
                    for k in range(old, num_cells):
                        size[c] -= size[k]
                    # The whole cell refines others anyway; its largest part need not.
                    largest = c
                    for k in range(old, num_cells):
                        if size[k] > size[largest]:
                            largest = k
                    if queued[c]:
                        largest = -1
                    for k in range(old - 1, num_cells):
                        part = c if k < old else k
                        if not queued[part] and part != largest:
                            queue[end % n] = part
                            end += 1
                            queued[part] = True
                t = after
            number[touched[:num_touched]] = 0
        limits[g + 1] = num_cells

    cell_ptr = np.zeros(num_cells + 1, np.int64)
    cell_head = np.empty(head.shape[0], np.int64)
    count = np.empty(head.shape[0], np.int64)
    fill = 0
    for c in range(num_cells):
        i = node[first[c]]  # any node will do
        last = -1
        for k in np.sort(cell[head[ptr[i] : ptr[i + 1]]]):
            if k != last:
                cell_head[fill], count[fill] = k, 0
                fill += 1
                last = k
            count[fill - 1] += 1
        cell_ptr[c + 1] = fill
    return cell, size[:num_cells], limits, cell_ptr, cell_head[:fill], count[:fill]
