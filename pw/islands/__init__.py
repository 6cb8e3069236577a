"""Functions over several islands: XLA divides them over all devices, and this folder cuts what it made.

XLA's collectives end at an island. So a function whose devices are on several islands becomes ordinary
computations on each island, with edges between them:

1. `division`: XLA's partitioner divides the function over all devices, as on one island. Each device then has a
   function of its own shards, in which every collective is one operation.
2. `assignment`, `groups`: which devices are on which island, and which collectives cross islands.
3. `partial_sums`: finds where the sums over islands are needed. Sums inside of a loop move behind it.
4. `cutting`: divides the operations into pieces, between the collectives that cross.
5. `sums`, `exchanges`, `picking`, `collectives`: what the pieces before and behind a collective do of it.
6. `writing`: makes a module of each piece, for the devices of one island.
7. `plan`, `running`: the result, and the order in which pieces run; `pw.jit` and the gateway record it as a
   program.

`cut` is the entrance.

All that XLA can divide on one island can so be divided over several. A program of pieces has edges and
computations only, so replay, scheduling and the simulator know nothing new.
"""
