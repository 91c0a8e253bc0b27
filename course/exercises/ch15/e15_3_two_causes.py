"""15.3: a sick run with two causes, one of each kind; each row has a different run."""

from course.practise.task import diagnosis

EXERCISE = diagnosis("15.3", "two_causes", rows=3, points=4)
