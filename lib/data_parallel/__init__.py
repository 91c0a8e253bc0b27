"""Every rank takes a part of the batch, and all agree on the mean gradient: whole, or each its shard (ZeRO, FSDP).

May import `lib.mesh`, `lib.launch`, `lib.comm`, `lib.trace`, `lib.placement`, `lib.facts` and `lib.cost`.
Must never know the other techniques: what a module holds is just parameters here.
"""
