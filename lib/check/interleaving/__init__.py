"""Chapter 11: the interleaved order, and what it wins and costs.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
