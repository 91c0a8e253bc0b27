"""01.4: the cheapest recomputation with which the activations of all layers fit."""

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import whole

# Of the memory, per row and token of a layer: how many times the width, and which part of 5as; and bytes more in all.
MEMORIES = (
    *((34, 1, more) for more in (0, -1, 1000)),
    *((34, part, 0) for part in (1 / 2, 1 / 8, 1 / 64)),
    *((34, 0, more) for more in (0, -1, 1000)),
    *((2, 0, more) for more in (0, -1, 1000)),
    *((times, 0, 0) for times in (3 / 2, 1 / 2)),
)


def inputs(generator, n):
    """5as/h is no whole number, and exact in floating point."""
    cases = []
    for times, part, more in MEMORIES:
        a = 4 * whole(generator, 2, 9)
        b, s, layers = whole(generator, 2, 6), 64 * whole(generator, 8, 32) + 32, whole(generator, 20, 65)
        h = 64 * a
        kept = layers * s * b * (times * h + part * 5 * a * s)
        cases.append((b, s, h, a, layers, int(kept) + more))
    return [{"cases": cases}]


def recomputation(rows, tokens, width, heads, layers, memory_bytes):
    sbh = tokens * rows * width
    kept = {
        "none": sbh * 34 + 5 * heads * tokens**2 * rows,
        "selective": sbh * 34,
        "full": sbh * 2,
    }
    for choice, a_layer_bytes in kept.items():
        if layers * a_layer_bytes <= memory_bytes:
            return choice
    return None


def unrolled(rows, tokens, width, heads, layers, memory_bytes):
    a_layer_bytes, sbh = memory_bytes / layers, tokens * rows * width
    if sbh * (34 + 5 * heads * tokens / width) <= a_layer_bytes:
        return "none"
    if 34 * sbh <= a_layer_bytes:
        return "selective"
    return "full" if 2 * sbh <= a_layer_bytes else None


MISTAKES = """
layers * a_layer_bytes => a_layer_bytes
    You count the activations of one layer. All layers keep theirs until backward reaches them.
        Multiply by `layers`.
<= memory_bytes => < memory_bytes
    Nearly: activations that fill the memory to the last byte fit.
        Compare with <=.
sbh * 34 + 5 * heads * tokens**2 * rows => sbh * (34 + 5 * heads * tokens // width)
or sbh * 34 + 5 * heads * tokens**2 * rows => sbh * (34 + 5 * (heads * tokens // width))
    You round 5as/h down to a whole number, and then multiply by sbh.
        Divide with /, or multiply first: 5as²b.
sbh * 34 + 5 * heads * tokens**2 * rows => sbh * 34 + 5 * tokens**2 * rows
    You counted the attention probabilities of one head.
        Each of the `heads` has its own: 5as/h.
sbh * 34 + 5 * heads * tokens**2 * rows => sbh * 34
    You left out the attention probabilities, 5as/h.
        Without them there would be nothing to gain from "selective".
tokens * rows * width => tokens * width
tokens**2 * rows => tokens**2
    You counted one sequence.
        A microbatch of b sequences keeps b times as much.
kept.items() => reversed(kept.items())
    You choose the way that keeps least. Recomputing costs time.
        Take the first that fits: "none", "selective", "full".
sbh * 2 => 0
or return None => return "full"
    You take "full" for free, and return it whatever the memory is.
        It still keeps the input of each layer, 2sbh bytes, which may not fit: then the answer is None.
sbh * 2, => sbh,
    For "full" you count one byte per element of a layer's input.
        An element in 16 bits has two: 2sbh.
return choice => return None if choice == "none" else choice
    You return None where no recomputation is needed. None says that nothing fits.
        Return the word "none".
returns None
    Each of your results is None.
        Is a `return` missing?
returns ANYTHING if result is None else result
    All is right where something fits. Where nothing fits, you return something else than None.
        Return None itself, no word.
"""

EXERCISE = exercise(globals(), points=2, right=(recomputation, unrolled))
