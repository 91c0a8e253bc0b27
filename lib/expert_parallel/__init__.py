"""Expert parallelism: every rank has some of the experts, and tokens travel to them and back.

May import `lib.mesh`, `lib.comm`, `lib.cost`, `lib.conjugate`, `lib.placement`, `lib.moe` and
`lib.tensor_parallel`, which knows what is custom in a model.
Must never know what lies around a mixture: it sees its own groups, and tokens that may be some of all.
"""
