"""The processes of a run: how ranks are started, watched, compared and ended.

May import `lib.cost`, `lib.trace`, `lib.mesh` and `lib.comm`; only the code that runs inside a rank imports torch. Must
never know a layer, a schedule or a chapter.
"""
