"""A schedule is data: what each rank does, in order. `action` says what that is, each other file writes one kind.

May import nothing else.
Must never know when anything runs, how it is sent, or what a stage computes: others read the list.
"""
