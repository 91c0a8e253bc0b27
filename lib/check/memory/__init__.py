"""Chapter 1: bytes, days and what a device holds.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
