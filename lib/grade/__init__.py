"""Grade submissions: `python -m lib.grade assignments/hw1.json submissions/ --out grades`.

No notebook is executed. Its functions and classes are taken as text, defined in ranks of a user without rights
(`jail`), and what these return is judged by `lib.check` in another process.

May import `lib.check`, `lib.runtime`.
Must never be known by any other room.
"""
