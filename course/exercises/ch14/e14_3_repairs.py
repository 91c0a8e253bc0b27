"""14.3: why six layouts are refused, and the one change that each needs."""

from functools import cache

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import kind, several, word
from course.check.refusals import (
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


def body(answer, group, given):
    pairs = several(answer(), len(broken_layouts()))
    if all(pair is None for pair in pairs):
        return {FOUND: NO_PAIRS}
    for i, pair in enumerate(pairs):
        found, figures = judged(i, pair)
        if found != HOLDS:
            return {FOUND: found, SEEN: f"Layout {i + 1}: {figures}" if figures else f"Layout {i + 1}."}
    return {FOUND: HOLDS}


def judged(i, pair):
    """What is to be said of the pair for this layout, and the figures that show it."""
    said, repaired = several(pair, 2)
    training, layout = broken_layouts()[i]
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
    late = step_s(training, followed(new)).total / fastest_s(i) - 1
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
def fastest_s(i):
    """Of a step, with the best single change."""
    training, layout = broken_layouts()[i]
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


def with_stages():
    """Different changes; dp as it follows; plain tuples."""
    pairs, broken = repairs(), [layout for _, layout in broken_layouts()]
    pairs[1] = "layers", broken[1]._replace(pp=4, dp=4)
    pairs[4] = "states", broken[4]._replace(pp=4, dp=2)
    return tuple((word.upper(), tuple(layout)) for word, layout in pairs)


MISTAKES = """
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

EXERCISE = exercise(globals(), points=3, right=(repairs, with_stages), inputs=lambda generator, n: [{}], ranks=(1,))
