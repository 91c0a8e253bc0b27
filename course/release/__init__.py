"""Write the files of a homework for a course: `python -m course.release course/assignments/hw1.json --out release`.

The notebooks of the book have all exercises of a chapter, with links to solutions. A homework has some of them, with
its own title and a due date, and without any link to an answer.

May import `course.check`, `course.grade`.
No room may import it.
"""

# What a notebook imports.
LIBRARY = ("lib", "course", "book/__init__.py", "book/our_run.py", "book/figures", "book/published", "book/trials")
