"""15.1: a sick run with one cause that makes numbers wrong; each row has a different run."""

from course.practise.task import diagnosis

EXERCISE = diagnosis("15.1", "wrong_numbers", rows=3)
