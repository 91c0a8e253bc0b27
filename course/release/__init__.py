"""Write the files of a homework for a course: `python -m course.release course/assignments/hw1.json --out release`.

The notebooks of the book have all exercises of a chapter, with links to solutions. A homework has some of them, with
its own title and a due date, and without any link to an answer.

May import `course.check`, `course.grade`.
No room may import it.
"""

# What a notebook imports.
OF_BOOK = "__init__.py", "our_run.py", "explain", "figures", "published", "trials"
LIBRARY = ("lib", "course", *(f"book/{name}" for name in OF_BOOK))
