"""Chapter 2: collectives by hand, and what a link costs.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
