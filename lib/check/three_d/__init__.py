"""Chapter 13: groups of a mesh, sums, the clip, a step on eight ranks, a hang, a layout.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
