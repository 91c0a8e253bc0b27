"""Chapter 9: turns, peaks.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
