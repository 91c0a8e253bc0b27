"""A schedule is data: the actions of each rank, in order. `action` defines them; every further file writes one kind.

May import nothing else.
Must never know times, messages, or the computation of a stage: its readers add them.
"""
