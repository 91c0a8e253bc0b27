"""Chapter 6: pairs, heads, the vocabulary.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
