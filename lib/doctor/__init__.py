"""Three looks at a run: the cluster before it trains, the traces of its steps, the numbers of a step.

The cluster says its settings, its links, and the rank that all others wait for; traces, who waits; `numbers`, whether
the step is that of one process.

May import `lib.comm`, `lib.cost`, `lib.kineto`, `lib.launch`, `lib.mesh`, `lib.runtime`, `lib.torchrun`, `lib.trace`.
Must never know a layer; what is trained, it sees only as tensors with names.
"""
