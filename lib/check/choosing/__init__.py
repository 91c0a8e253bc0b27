"""Chapter 14: a step of uneven ranks, bytes, what binds, a wrong formula, a calibration, a choice for two networks.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
