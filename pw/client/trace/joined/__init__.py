"""A `pw.jit` function over a mesh with an axis over islands becomes ordinary computations and edges.

XLA's collectives end at an island. So the client cuts such a function where a value is reduced over
the axis between islands:

1. `module`: Shardy's passes, which jaxlib has, divide the exported function over all devices, and
   then make the collectives over the axis between islands explicit.
2. `sums`: finds where the sums over islands are needed. Sums inside of a loop move behind it.
3. `local`: rewrites the function for one island's part of every value.
4. `cutting`: divides the operations into pieces, and the sums into buckets.
5. `writing`: exports each piece for an island's own mesh. XLA divides it over the other axes.
6. `function`: records pieces, sums and their edges as nodes of a program, for each island.

The reduction is a reduce-scatter and an all-gather over the hosts of the islands (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, give the bound of
2 (N - 1) / N times the size): each island adds one part of a bucket, in the order of the islands,
and sends the sum to the others. It consists of edges and computations only, so replay, scheduling
and the simulator know nothing new.
"""
