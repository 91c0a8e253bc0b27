"""Write the files of a homework for a course: `python -m course.release course/assignments/hw1.json --out release`.

The notebooks of the book have all exercises of a chapter, with links to solutions. A homework has some of them, with
its own title and a due date, and without any link to an answer.

May import `course.check`, `course.grade`.
No room may import it.
"""

# What a notebook imports. The homeworks lie beside the rooms of course/, and are not in it: they have model answers.
ROOMS = "check", "exercises", "grade", "museum", "practise", "release", "workshop"
FILES_OF_BOOK = "__init__.py", "axes.py", "axes_table.py", "our_run.py", "terms.py"
OF_BOOK = *FILES_OF_BOOK, "explain", "figures", "published", "trials"
LIBRARY = ("lib", "course/__init__.py", *(f"course/{room}" for room in ROOMS), *(f"book/{name}" for name in OF_BOOK))
