"""H = A H + X in all its forms: a linear recurrence on a graph of states.

What operators share is here: the graph of states (`states`), its linear system
(`levels`), the mask form (`plain.matrices`; on GPUs `mask`), the chunk form of
paths (`chunks`; on GPUs `chunks` and `carry`), sweeps over the
rows of factors (`rows`), and states carried on GPUs (`chains`). Each
operator is a folder, and imports none of the others:

* `dag_scan`: A is triangular; states on nodes, edges or grids.
* `resolvent`: any A, by sparse elimination or by iteration.
* `delta_scan`: nodes overwrite what their keys read.
* `channel_scan`, `selective_scan`: one scalar state, or one decay, for each channel.
"""
