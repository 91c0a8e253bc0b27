"""How each technique works, as pictures that one can play.

May import `lib.figures`, `lib.runtime.call_table` and what a mechanism is made of: steps, schedules, layouts. Each file
is one mechanism.
"""
