"""How each technique works, as pictures that one can play.

May import `book.figures`, `lib.runtime.hang`, `lib.moe` and the content of a mechanism: steps, schedules, layouts. Each
file is one mechanism.
"""
