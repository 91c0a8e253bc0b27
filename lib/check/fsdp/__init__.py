"""Chapter 5: units, prefetch, saved shards.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
