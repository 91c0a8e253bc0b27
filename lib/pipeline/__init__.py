"""Every rank has some of the layers, and microbatches pass through them in an order that is written down.

May import `lib.mesh`, `lib.launch`, `lib.comm`, `lib.trace`, `lib.conjugate`, `lib.deferred`, `lib.sleep`,
`lib.model`, `lib.memory` and `lib.cost`.
Must never know the other techniques: a stage is any module. What is about the order alone is pure Python.
"""
