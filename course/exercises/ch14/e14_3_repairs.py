"""14.3: why six layouts are refused, and the one change that each needs."""

import inspect
import re
from dataclasses import replace
from functools import cache, partial

from course.check.compare import SEEN
from course.check.edits import Edited, exercise
from course.check.exercise import kind, several, with_variants, word
from course.check.refusals import (
    BROKEN,
    GPU_COUNT,
    NODE,
    NOTHING_BINDS,
    PIPELINE_ZERO3,
    ROUNDS,
    binds,
    broken_layouts,
    layout_of,
)
from lib.planner import step_s
from lib.planner.search import layout_text

SLOWER = 0.03  # a repair may take so much longer than the best one
FIELDS = {"tp": (1, 2, 4, 8, 16), "pp": (1, 2, 4, 8, 16, 32), "rows": (1, 2, 4, 8)}
FIELDS |= {"stages_per_rank": tuple(range(1, 13)), "zero": (0, 1, 3), "recompute": ("none", "full")}
COUNTS, MEMORY = ("heads", "layers", "batch", "node"), ("states", "activations")
REFUSED = dict.fromkeys(MEMORY, "still too large")
REFUSED |= {NODE: NODE, GPU_COUNT: GPU_COUNT, PIPELINE_ZERO3: PIPELINE_ZERO3, ROUNDS: ROUNDS}
FOUND, HOLDS, NO_PAIRS = "what the planner says", "each is found and repaired", "no pairs"
WORDS = "the words"  # of a wrong answer, and not judged: an answer to a different row is told by them


def body(answer, group, given, row=""):
    pairs = several(answer(), len(BROKEN[row]))
    if all(pair is None for pair in pairs):
        return {FOUND: NO_PAIRS}
    for i, pair in enumerate(pairs):
        found, figures = judged(i, pair, row)
        if found != HOLDS:
            seen = f"Layout {i + 1}: {figures}" if figures else f"Layout {i + 1}."
            return {FOUND: found, WORDS: [several(pair, 2)[0] for pair in pairs], SEEN: seen}
    return {FOUND: HOLDS}


def judged(i, pair, row):
    """What is to be said of the pair for this layout, and the figures that show it."""
    said, repaired = several(pair, 2)
    training, layout = broken_layouts(row)[i]
    right, figures = binds(training, layout)
    if not isinstance(said, str):
        return NO_PAIRS, f"got {kind(pair)}"
    if word(said) not in COUNTS + MEMORY:
        return "no such word", f"{said!r} is none of {', '.join(COUNTS + MEMORY)}."
    if word(said) != right:
        kinds = ["a count" if w in COUNTS else "memory" for w in (word(said), right)]
        return f"{kinds[0]} in place of {kinds[1]}", "" if right in COUNTS else figures
    new = layout_of(repaired)
    if new is None:
        return "no layout", f"got {kind(repaired)}"
    changed = [field for field in FIELDS if getattr(new, field) != getattr(layout, field)]
    if len(changed) != 1:
        return "several changes" if changed else "no change", f"changed: {', '.join(changed) or 'nothing'}"
    still, why = binds(training, followed(new))
    if still != NOTHING_BINDS:
        return REFUSED.get(still, "a count still cannot be shared out"), why
    late = step_s(training, followed(new)).total / fastest_s(i, row) - 1
    if late > SLOWER:
        return "slower", f"{layout_text(followed(new))}: {late:.0%} more seconds than with the best single change"
    return HOLDS, ""


def followed(layout):
    """With the fields that depend on the rest: the replicas, and sequence parallelism wherever there is tp."""
    return layout._replace(dp=max(1, 64 // (layout.tp * layout.pp)), sequence_parallel=layout.tp > 1)


def singles(layout):
    """All layouts that differ in one field, and in the fields that depend on it."""
    for field, values in FIELDS.items():
        yield from (followed(layout._replace(**{field: x})) for x in values if x != getattr(layout, field))


@cache
def fastest_s(i, row=""):
    """Of a step, with the best single change."""
    training, layout = broken_layouts(row)[i]
    able = (one for one in singles(layout) if binds(training, one)[0] == NOTHING_BINDS)
    return min(step_s(training, one).total for one in able)


def repairs():
    changes = [
        ("heads", {"tp": 2}),
        ("layers", {"pp": 2}),
        ("batch", {"rows": 1}),
        ("node", {"tp": 4}),
        ("states", {"zero": 1}),
        ("activations", {"rows": 1}),
    ]
    broken = [layout for _, layout in broken_layouts()]
    return [(word, layout._replace(**change)) for (word, change), layout in zip(changes, broken)]


def with_stages(answer=repairs, row=""):
    """Different changes; dp as it follows; plain tuples."""
    pairs = []
    for (why, repaired), (_, broken) in zip(answer(), broken_layouts(row), strict=True):
        if why in ("layers", "states"):
            repaired = broken._replace(pp=4, dp=16 // broken.tp)
        pairs.append((why.upper(), tuple(repaired)))
    return tuple(pairs)


MISTAKES = """
in what the planner says:
returns [word for word, _ in result]
    Return six pairs, one for each layout: the word for the limit, and the repaired layout.
"batch" => "sequences"
    That is none of the six words of the task.
"heads" => "states"
    You say that memory binds.
        This layout is refused before it has any: something cannot be shared out evenly, or a group reaches too far.
        First divide, then add up bytes.
"activations" => "batch"
    Everything divides here, and tp stays on its node.
        Add up the bytes of the rank with the highest peak.
"layers" => "heads"
    Something else binds: a different count cannot be shared out, or tp reaches over nodes.
        tp divides heads, and reaches over ranks of a node; p times v divides layers, or layers and two more; dp times b
        divides the sequences of a step.
"states" => "activations"
    Memory binds, but not this kind.
        States bind if they alone are too large; activations if the states fit without.
layout._replace(**change) => change
    The second of a pair is a Layout4D, such as `layout._replace(tp=2)`.
{"tp": 2} => {"dp": 8}
    The layout is as it was.
        Dp follows from the rest, so a change of dp alone changes nothing.
{"zero": 1} => {"zero": 1, "recompute": "full"}
    You changed several things.
        One of tp, pp, rows, stages_per_rank, zero or recompute will do.
{"pp": 2} => {"pp": 16}
    With your change a count still cannot be shared out.
        Divide heads by tp, layers by p times v, sequences by dp times b.
{"tp": 4} => {"pp": 1}
    Your layout still has tp over several nodes.
        Make tp at most the 8 GPUs of a node.
{"tp": 4} => {"pp": 16}
    Your layout needs more GPUs than there are.
        tp · pp is at most 64; dp takes the rest.
{"zero": 1} => {"zero": 3}
    Your layout has ZeRO-3 next to tp or a pipeline, and the planner refuses that.
        ZeRO-3 gathers whole parameters: here it goes with dp alone.
{"zero": 1} => {"stages_per_rank": 2}
    Your layout has several stages per rank, which need a pipeline, and a multiple of p microbatches.
        Change something else.
{"tp": 4} => {"tp": 2}
    Your change leaves everything divided evenly, but it does not fit into memory.
        Change what the larger of states and activations is divided by.
("activations", {"rows": 1}) => ("activations", {"recompute": "full"})
or {"tp": 2} => {"tp": 4}
    Your layout is possible, and it fits. But a different single change costs less time. Full recomputation costs a
    third of the blocks, a smaller tp fewer sums, a smaller b a shorter bubble.
        Take the mildest change that fits.
"""

# In this order the program of a row has the book's changes.
ORDERS = {"": (0, 1, 2, 3, 4, 5), "A": (4, 2, 0, 5, 1, 3), "B": (3, 5, 4, 1, 0, 2)}
TASK = """
The six layouts are these. `broken_layouts("{row}")` returns them.

| | model | tp | pp | dp | b | ZeRO | sequences of a step |
| --- | --- | --- | --- | --- | --- | --- | --- |
{table}
"""


def of_row(text, row):
    """The text of a program, with the lines of its changes in the order of the row."""
    head, *changes, tail = re.split(r"(?<=\n)(?= {8}\(\")|(?<=\n)(?= {4}\]\n)", text)
    ordered = "".join(changes[i] for i in ORDERS[row])
    return f"{head}{ordered}{tail}".replace("broken_layouts()", f'broken_layouts("{row}")')


def row(name=""):
    """The exercise with the layouts of this row."""
    program = Edited(__name__, of_row(inspect.getsource(repairs), name), "repairs").load() if name else repairs
    table = [
        f"| {i + 1} | {model} | {tp} | {pp} | {64 // (tp * pp)} | {rows} | {zero} | {sequences} |"
        for i, (model, sequences, tp, pp, rows, zero) in enumerate(BROKEN[name])
    ]
    made = exercise(
        globals() | {"body": partial(body, row=name)},
        points=3,
        right=(program, partial(with_stages, program, name)),
        edited=(repairs,),
        inputs=lambda generator, n: [{}],
        ranks=(1,),
        task=TASK.format(row=name, table="\n".join(table)).strip() if name else "",
    )
    wrong = (replace(m.wrong, text=of_row(m.wrong.text, name)) for m in made.mistakes)
    return replace(made, mistakes=tuple(replace(m, wrong=w) for m, w in zip(made.mistakes, wrong, strict=True)))


EXERCISE = with_variants(row(), row("A"), row("B"))
