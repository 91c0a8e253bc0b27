"""A small exercise of formulas, for tests of the engine that need no ranks' worth of code: it is in no chapter."""

from course.check.exercise import Exercise, Mistake, each_call, whole


def right_bytes(p, b, n):
    return 2 * (n - 1) / n * p * b


def inputs(generator, ranks):
    sizes = [1, 2, whole(generator, 3, 9), 64]
    return [{"cases": [(whole(generator, 10**6, 10**9), (2, 4)[i % 2], n) for i, n in enumerate(sizes)]}]


BYTES = Exercise(
    id="03.9",
    title="bytes_sent",
    points=1,
    body=each_call("bytes_sent"),
    inputs=inputs,
    right=(right_bytes,),
    ranks=(1,),
    mistakes=(Mistake("That is one half of an all-reduce.", lambda p, b, n: (n - 1) / n * p * b),),
)
