"""The museum: real bugs of distributed training, rebuilt small enough to read; each room is an exercise.

A visitor gets what the victims had, guesses the kind of cause, sees it, and writes the check that would have caught it.

May import `lib`, `course.check`.
Only `course.exercises` and `book.figures` may import it.
"""
