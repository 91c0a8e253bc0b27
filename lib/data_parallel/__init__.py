"""Data parallelism: every rank trains on its rows of the batch, and gradients are averaged, in full or in shards
(ZeRO).

May import `lib.mesh`, `lib.launch`, `lib.comm`, `lib.trace`, `lib.placement`, `lib.facts`, `lib.clip`,
`lib.versions` and `lib.cost`.
Must never know the other techniques: here a module is a set of parameters.
"""
