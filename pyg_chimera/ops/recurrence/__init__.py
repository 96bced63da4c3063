"""H = A H + X in all its forms: a linear recurrence on a graph of states.

Five modules declare the operators, with their public functions. None imports another.

* `dag_scan`: A is triangular; states on nodes, edges or grids.
* `resolvent_mix`: any A, by sparse elimination or by iteration.
* `delta_scan`: nodes overwrite what their keys read.
* `channel_scan`, `selective_scan`: one scalar state, or one decay, for each channel.

`positive_sums` is made of `resolvent_mix`. Algorithms are in rooms, one file each. A
room imports only those before it.

* `plan`: what several of them read, mostly of the graph alone.
* `dense`: the definitions, which tests compare with.
* `plain`: plain PyTorch, on any device, differentiated by autograd.
* `cpu`: kernels compiled by numba.
* `gpu`: kernels compiled by Triton.
* `choose`: the table of all algorithms, where each fits, and what it costs.
"""
