"""Checkpoints of a training run: saved under one layout, loaded under any layout, and complete or absent.

May import `lib.model`, `lib.mesh`, `lib.comm`, `lib.cost`, `lib.launch`, `lib.runtime` (its words for ranks),
`lib.placement`, `lib.layout`, `lib.data_parallel` (its checks of a state) and `lib.parallel_model`. Must never know
how a step is computed: it handles shards of parameters, by serial name, and a number of steps.
"""
