"""What a cluster says of itself before it trains: its settings, its links, the rank that all others wait for.

May import `lib.comm`, `lib.cost`, `lib.kineto`, `lib.launch`, `lib.mesh`, `lib.runtime`, `lib.torchrun`, `lib.trace`.
Must never know a layer, or what is trained.
"""
