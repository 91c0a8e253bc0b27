"""The exercises: a file for each, `e03_1_average_gradients.py`, found by its name.

A file has all that is known of its exercise: what ranks get, what a rank does with an answer, what one process
computes, right programs, and the wrong programs that people write, each with a hint.

May import what `lib.check` may, `lib.data`, `lib.parallel`, `lib.tensor_parallel`, and `torch.distributed` in its
programs.
Must never know another exercise.
"""
