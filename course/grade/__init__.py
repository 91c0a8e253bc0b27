"""Grade submissions: `python -m course.grade course/assignments/hw1.json submissions/ --out grades`.

No notebook is executed. The grader reads its functions and classes as text. Ranks of a user without rights define them
(`jail`), and `course.check` judges the results in a separate process.

May import `course.check`, `course.exercises` and `course.practise` (to send them by value), `lib.runtime`.
Must never import `course.release`.
"""
