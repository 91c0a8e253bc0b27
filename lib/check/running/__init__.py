"""Chapter 10: messages, ties.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
