"""Grade submissions: `python -m lib.grade assignments/hw1.json submissions/ --out grades`.

No notebook is executed. The grader reads its functions and classes as text. Ranks of a user without rights define them
(`jail`), and `lib.check` judges the results in a separate process.

May import `lib.check`, `lib.runtime`.
Must never import `lib.release`.
"""
