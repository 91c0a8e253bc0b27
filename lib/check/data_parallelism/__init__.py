"""Chapter 3: what gradients become, and when they are sent.

May import what `lib.check` may. Must never know another chapter's exercises, unless it uses them itself.
"""
