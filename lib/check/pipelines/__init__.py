"""Chapter 8: cuts, chains, schedules, microbatches.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
