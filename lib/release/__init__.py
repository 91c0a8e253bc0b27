"""Make of an assignment what a course needs: `python -m lib.release assignments/hw1.json --out release`.

The notebooks of the book hold all exercises of a chapter, with solutions beside them. A homework is some of them, under
its own title, with a day it is due, and nothing that leads to an answer.

May import `lib.check`, `lib.grade`.
Must never be known by any other room.
"""
