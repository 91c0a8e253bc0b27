"""Pipeline parallelism: every rank has some of the layers, and a schedule orders the microbatches.

May import `lib.mesh`, `lib.launch`, `lib.comm`, `lib.trace`, `lib.conjugate`, `lib.deferred`, `lib.recompute`,
`lib.model`, `lib.memory`, `lib.versions` and `lib.cost`. Must never know the other techniques: a stage is any module.
Files about the order alone are pure Python.
"""
