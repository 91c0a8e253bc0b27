"""Chapter 4: steps and shards.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
