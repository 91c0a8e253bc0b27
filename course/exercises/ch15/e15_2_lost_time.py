"""15.2: a sick run with one cause that costs time or bytes; each row has a different run."""

from course.practise.task import diagnosis

EXERCISE = diagnosis("15.2", "lost_time", rows=3)
