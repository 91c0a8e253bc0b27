"""The schedule workshop: a schedule that someone typed, and what is to be said of it.

May import `lib.pipeline` and `lib.cost`; nothing that needs torch, so that pages are built without it.
Must never know exercises: they ask it for a verdict.
"""
