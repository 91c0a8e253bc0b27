"""07.5: how to fit the activations of a stage of Llama 3 405B into three limits, with the numbers that defend it."""

import inspect
import re
from dataclasses import replace
from functools import partial

from course.check.edits import Edited, exercise
from course.check.exercise import kind, rounded, several, with_variants, word

LIMITS = {"A": (8192, 12), "B": (8192, 9), "C": (131072, 22)}  # tokens, and GB at most
YES, NO, NONE = "it fits", "it does not fit", "no such choice"


def body(answer, group, given, limits=LIMITS):
    result = answer()
    found = {"what was returned": kind(result)}
    for name, row in zip("ABC", several(result, 3), strict=True):
        t, way, recompute, gigabytes, sent = several(row, 5)
        t, way, again = str(rounded(t)), str(word(way)), f"{'' if recompute else 'not '}recomputed"
        found[f"case {name}: the choice"] = f"t={t}, {way}, {again}"
        found[f"case {name}: whether {name} recomputes"] = again
        found[f"case {name}: whether {name} fits"] = fits(*limits[name], t, way, bool(recompute))
        found |= {f"case {name}: GB": rounded(gigabytes, 1), f"case {name}: sent": rounded(sent, 1)}
    return found


def fits(tokens, most, t, way, again):
    """Whether a choice does, by the table of the chapter: bytes of a layer in full on each rank, and divided by t."""
    table = {"tp": (8, 23.75), "sp": (4, 27.75), "sp, gathered again": (0, 31.75)}
    if t not in ("1", "2", "4", "8") or way not in table:
        return NONE
    full, divided = table[way]
    one = full + divided / int(t)
    inputs = 2 if way == "tp" else 2 / int(t)
    return YES if tokens * 16384 * (7 * inputs + one if again else 8 * one) <= most * 1e9 else NO


def choose():
    h, layers = 16384, 8
    inside = 2 * (1 + 2 * 8 / 128) + 2 + 2 * 3 * 53248 / h  # divided by t
    units = {"tp": (8, 10), "sp": (8, 11), "sp, gathered again": (10, 13)}
    chosen = []
    for tokens, most in ((8192, 12), (8192, 9), (131072, 22)):
        fit = []
        for t in (1, 2, 4, 8):
            kept = {"tp": 8 + inside / t, "sp": 4 + (4 + inside) / t, "sp, gathered again": (8 + inside) / t}
            for way, per_layer in kept.items():
                inputs = (layers - 1) * (2 if way == "tp" else 2 / t)
                for again, n_bytes in enumerate((layers * per_layer, inputs + per_layer)):
                    GB = tokens * h * n_bytes / 1e9
                    sent = units[way][again] * (t - 1) / t
                    if GB <= most:
                        fit.append((again, sent, t, way, GB))
        again, sent, t, way, GB = min(fit)
        chosen.append((t, way, bool(again), GB, sent))
    return chosen


def by_hand():
    return [(4, "sp", False, 11.7, 6), (8.0, " SP", False, 8.02, 7), (8, "sp", 1, 19.8, 9.63)]


MISTAKES = """
(layers * per_layer, inputs + per_layer) => (layers * 2 * per_layer, inputs + 2 * per_layer)
    Your gigabytes are twice too large.
        The table counts bytes of values in bfloat16, 2 each; they are in it already.
(10, 13) => (8, 13)
    You take 8 units for sequence parallelism that gathers inputs again.
        Two more all-gathers in backward make 10: that is its price, and with t = 4 it sends more than t = 8 with full
        inputs kept.
in GB:
chosen.append((t, way, bool(again), GB, sent)) => chosen.append((t, way, bool(again), GB * 1e9 / 2**30, sent))
    Your gigabytes have 2^30 bytes.
        Those of the limits have 10^9.
(layers * per_layer, inputs + per_layer) => (per_layer, inputs + per_layer)
    You count one layer. The rank has eight.
        Without recomputation it keeps the activations of all of them.
8 + inside / t => 10 + 24 / t
4 + (4 + inside) / t => 4 + 30 / t
(8 + inside) / t => 34 / t
    You count a GPT layer with dropout, 10 + 24/t. Llama has no masks and three matrices.
        Add up the table's rows.
2 * (1 + 2 * 8 / 128) => 2 * (1 + 2)
    You count as many heads for keys and values as for queries, 6 bytes.
        There are 8 for 128: 2.25 bytes.
4 + (4 + inside) / t => (4 + 4 + inside) / t
    For sequence parallelism that keeps its full inputs you divide everything by t. The inputs of the column-parallel
    layers, 4 bytes, stay in full on every rank.
        Only gathering them again divides them.
in case C:
(layers - 1) => layers
inputs + per_layer => inputs
    Case C: you leave out the layer that is being recomputed.
        For so many tokens, all that it keeps is the largest part.
(layers - 1) => layers
    Case C: you count one tensor twice.
        The input of the layer that runs backward is also the first of the tensors that this layer keeps, so only the
        inputs of the seven others are added.
in choice:
if GB <= most: => if True:
    Your choices send least, and do not fit: with one rank nothing is sent.
        Compare the gigabytes with the limit of each case first.
(1, 2, 4, 8) => (8,)
or (1, 2, 4, 8) => (8,)
min(fit) => min(fit, key=lambda choice: choice[1])
    You always take t = 8.
        In case A a smaller group fits as well and sends less: a unit is (t-1)/t of x.
fit.append((again, sent, t, way, GB)) => fit.append((again, t, sent, way, GB))
again, sent, t, way, GB = min(fit) => again, t, sent, way, GB = min(fit)
    You take the smallest t that fits. In case B its all-gathers send more than a larger t.
        Compare units · (t-1)/t.
fit.append((again, sent, t, way, GB)) => fit.append((again, GB, sent, t, way))
again, sent, t, way, GB = min(fit) => again, GB, sent, t, way = min(fit)
    You take the choice that keeps least.
        A limit that holds is enough: memory that is left over buys nothing.
min(fit) => min(fit, key=lambda choice: choice[1])
or fit.append((again, sent, t, way, GB)) => fit.append((sent, again, t, way, GB))
again, sent, t, way, GB = min(fit) => sent, again, t, way, GB = min(fit)
or fit.append((again, sent, t, way, GB)) => fit.append((GB, again, sent, t, way))
again, sent, t, way, GB = min(fit) => GB, again, sent, t, way = min(fit)
    You recompute where something fits without.
        It costs a third more compute: the last resort, only case C needs it.
in whether A fits: returns [(2, *result[0][1:]), *result[1:]]
    Your choice for case A does not fit.
        Work out its bytes per token and element, from the rows of the chapter's table, times eight layers.
in whether B fits: returns [result[0], (4, *result[1][1:]), result[2]]
    Your choice for case B does not fit.
        Work out its bytes per token and element, from the rows of the chapter's table, times eight layers.
in whether C fits: returns [*result[:2], (4, *result[2][1:])]
    Your choice for case C does not fit.
        With full recomputation, add the inputs of seven layers and all that one layer keeps.
in whether A recomputes: returns [(*result[0][:2], True, *result[0][3:]), *result[1:]]
    In case A you recompute, and something fits without.
        It costs a third more compute: the last resort.
in whether B recomputes: returns [result[0], (*result[1][:2], True, *result[1][3:]), result[2]]
    In case B you recompute, and something fits without.
        It costs a third more compute: the last resort.
in sent:
(8, 10) => (8, 12)
(8, 11) => (8, 12)
(10, 13) => (10, 14)
    Your units under recomputation run the second forward to its end.
        It stops before the last collective.
chosen.append((t, way, bool(again), GB, sent)) => chosen.append((t, way, bool(again), GB, units[way][again]))
    You return units.
        A unit is (t-1)/t of bsh elements: counted in elements, degrees can be compared.
"""

BOOK = str(tuple(LIMITS.values()))  # as the program has them
TASK = """
The cases are these.

| case | tokens | at most |
|---|---|---|
{table}
"""


def in_order(answer, order):
    """The answer, whose cases come in this order of the book's."""

    def ordered():
        result = answer()
        return [result["ABC".index(case)] for case in order]

    return ordered


def in_other_words(answer):
    return tuple(
        [float(t), f" {way.upper()}", int(again), round(GB, 2), sent] for t, way, again, GB, sent in answer()
    )


def row(order="ABC", scale=1):
    """The exercise with the book's cases in this order, and so many times the tokens and the gigabytes of each."""
    scaled = {case: (int(tokens * scale), most * scale) for case, (tokens, most) in LIMITS.items()}
    limits = dict(zip("ABC", (scaled[case] for case in order), strict=True))

    def renamed(text):
        """The book's case A has a different letter here."""
        case = r"(?<=\bcase )[ABC]\b|(?<=\bCase )[ABC]\b|(?<=\bwhether )[ABC]\b"
        return re.sub(case, lambda found: "ABC"[order.index(found[0])], text)

    def of_row(program):
        text = program.text.replace(BOOK, str(tuple(scaled.values())))
        return in_order(replace(program, text=text).load(), order)

    made = exercise(
        globals() | {"body": partial(body, limits=limits)},
        points=2,
        right=(choose, by_hand),
        inputs=lambda generator, n: [{}],
        ranks=(1,),
    )
    if scale == 1:
        return made
    right = of_row(Edited(__name__, inspect.getsource(choose), choose.__name__))
    mistakes = (
        replace(
            m, wrong=of_row(m.wrong), hint=renamed(m.hint), repair=renamed(m.repair), about=(*map(renamed, m.about),)
        )
        for m in made.mistakes
    )
    table = "\n".join(f"| {case} | {tokens:,} | {most:g} GB |" for case, (tokens, most) in limits.items())
    return replace(
        made,
        right=(right, partial(in_other_words, right)),
        mistakes=tuple(mistakes),
        task=TASK.format(table=table).strip(),
    )


EXERCISE = with_variants(row(), row("BCA", 0.5), row("CAB", 2))
