"""How ranks live and die: processes, what they say, what they wait for, and what ends them.

May import `lib.cost`, `lib.trace`, `lib.mesh` and `lib.comm`; only what runs inside a rank imports torch.
Must never know a layer, a schedule or a chapter.
"""
