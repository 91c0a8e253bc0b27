"""Tensor parallelism: every rank has a shard of each weight matrix and works on the same sequences.

May import `lib.mesh`, `lib.comm`, `lib.trace`, `lib.cost`, `lib.placement`, `lib.conjugate`, `lib.deferred`,
`lib.recompute`, `lib.moe` and `lib.model`.
Must never know the other techniques: a layer sees its own group and nothing else.
"""
