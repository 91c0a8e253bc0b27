"""The exercises: a file for each, `ch03/e03_1_average_gradients.py`, found by its name.

A file holds everything about its exercise: the inputs of the ranks, the run of an answer on a rank, the result of one
process, right programs, and the wrong programs that people write, each with a hint.

May import `course.check`, `course.museum`, `course.practise`, `course.workshop`, its subject in `lib`, and
`torch.distributed` in its programs.
Must never know another exercise.
"""
