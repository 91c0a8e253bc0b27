"""13.6: a layout for 70B parameters on 64 GPUs, and the numbers that rule out three others."""

import inspect
import re
from dataclasses import asdict, replace
from functools import partial

from course.check.bill import ALL_HOLD, BOOK, Task, bill, costs_of, exceeded
from course.check.compare import SEEN
from course.check.edits import Edited, exercise
from course.check.exercise import ALL, Exercise, Mistake, known_number, several, with_variants
from lib.layout import Layout

PARTS = CHOICE, MEMORY, BUBBLE, BYTES = (
    "your layout",
    "layout A, GB on the GPU with the highest peak",
    "layout B, the bubble",
    "layout C, GB of gradients to other nodes",
)
SLIM = {"sequence_parallel": True, "recompute": "selective"}
RULED_OUT = (
    Layout(dp=2, pp=4, tp=8, microbatches=32, zero=1, sequence_parallel=True),
    Layout(dp=2, pp=8, tp=4, microbatches=32, zero=1, **SLIM),
    Layout(dp=4, pp=2, tp=8, microbatches=16, zero=1, **SLIM),
)


def body(answer, group, given):
    layout, *numbers = several(answer(), len(PARTS))
    if isinstance(layout, Layout):
        mine = asdict(layout)
    else:
        mine = "nothing" if layout is None else "no layout"
    return {CHOICE: mine} | {part: known_number(x, ()) for part, x in zip(PARTS[1:], numbers, strict=True)}


def compared(found, given, task=BOOK):
    """Whether the layout keeps all conditions; and each number as the known one that it is near."""
    known = zip(PARTS[1:], given["known"], strict=True)
    verdicts = {part: known_number(found[part], column) for part, column in known}
    if isinstance(found[CHOICE], str):
        return verdicts | {CHOICE: found[CHOICE]}
    layout = Layout(**found[CHOICE])
    verdicts[CHOICE] = exceeded(layout, task)
    if verdicts[CHOICE] != ALL_HOLD:
        verdicts[CHOICE + SEEN] = bill(layout, task)
    return verdicts


def choose_layout():
    mine = Layout(dp=2, pp=4, tp=8, microbatches=32, sequence_parallel=True, zero=1, recompute="selective")
    s, h, heads, billions = 4096, 8192, 64, 69.0
    states = billions * (2 + 2 + 12 / 2) / (4 * 8)
    layer = s * h * (34 + 5 * heads * s / h) / 8 / 1e9
    in_flight, layers = 4, 80 / 4
    a = states + in_flight * layers * layer
    b = (8 - 1) / (32 + 8 - 1)
    c = 2 * (4 - 1) / 4 * 2 * billions / (2 * 8)
    return mine, a, b, c


def but(layout, answer=choose_layout):
    """The right numbers, with a different layout."""
    return lambda: (layout, *answer()[1:])


def by_the_bill(layouts=RULED_OUT, task=BOOK):
    """Rounded, with replicas that are neighbours."""
    layout = replace(layouts[1], order="pp,dp,tp", schedule="interleaved", stages_per_rank=2)
    a, b, c = (costs_of(one, task) for one in layouts)
    return [layout, round(a.memory_bytes / 1e9), round(b.bubble, 3), round(c.over_dp / 1e9, 1)]


MISTAKES = """
returns result[0]
    Return four things: a Layout, and one number for each of A, B and C.

in your layout:
returns ({}, *result[1:])
    You did not return a Layout.
        Return one, such as Layout(dp=2, pp=2, tp=2, zero=1).
pp=4 => pp=2
    The degrees do not multiply to the cluster.
        Every GPU has one place on each axis.
dp=2, pp=4, tp=8, microbatches=32 => dp=1, pp=32, tp=2, microbatches=64
    Something cannot be shared out evenly.
        A stage has whole layers, a tp rank whole heads, and a replica equal numbers of microbatches of equal size.
zero=1, recompute="selective" => zero=1, schedule="zb-h1"
    The bill has closed forms only for 1f1b, interleaved and gpipe.
        Choose one of them.
pp=4, tp=8 => pp=2, tp=16
    A tensor-parallel group reaches over several nodes. It sends activations four times or more per layer and
    microbatch, and waits for each: that needs the links inside a node.
        Make tp smaller, or put it last in `order`.
dp=2, pp=4, tp=8, microbatches=32 => dp=8, pp=1, tp=8, microbatches=8
zero=1 => zero=0
    The optimizer state alone, 12 of 16 bytes per parameter, does not fit.
        Tp and pp divide it; dp only with ZeRO.
dp=2, pp=4, tp=8, microbatches=32 => dp=16, pp=2, tp=2, microbatches=4
    Parameters, gradients and optimizer state do not fit, before there is any activation.
        Tp and pp divide all three; ZeRO-1 divides the optimizer state over dp as well.
sequence_parallel=True, zero=1, recompute="selective" => zero=1
    Model states fit, activations do not. 1F1B keeps up to p microbatches, so more stages do not help the first.
        Sequence parallelism, selective recomputation, a smaller microbatch or a larger tp do; GPipe keeps all.
pp=4, tp=8 => pp=8, tp=4
    It fits, but the GPUs wait too long: (p-1)/v of m + (p-1)/v units.
        Take fewer stages, more microbatches, or several stages per rank. dp and m share the sequences: fewer replicas
        leave more microbatches to each.
zero=1 => zero=2
    Too much is sent between nodes: ZeRO-2 reduce-scatters the gradients of every microbatch.
        With a pipeline there are many of them; zero=1 sends them once per step.
dp=2, pp=4, tp=8, microbatches=32 => dp=4, pp=2, tp=8, microbatches=16
    Too many bytes of gradients are sent between nodes.
        A dp rank sends about 2(d-1)/d of its gradients: more stages, or a larger tp, leave it fewer parameters, and
        fewer replicas a smaller factor.
=> dp=1, pp=8, tp=8, microbatches=64
sequence_parallel=True, zero=1 => schedule="interleaved", stages_per_rank=5
    Too many bytes of activations are sent between stages.
        Each of v stages per rank sends every microbatch, and without sequence parallelism each tp rank sends the same
        full tensor.

in layout A:
in_flight, layers = 4, 80 / 4 => in_flight, layers = 1, 80 / 4
    Layout A: these are the activations of one microbatch.
        Under 1F1B the first of p ranks keeps p of them.
(34 + 5 * heads * s / h) => 34
    Layout A: that would fit.
        But without recomputation attention matrices are kept, 5as/h of 34 + 5as/h bytes.
states + in_flight * layers * layer => in_flight * layers * layer
    Layout A: that is the activations alone.
        Add the model states.
(2 + 2 + 12 / 2) => (2 + 2 + 12)
    Layout A: ZeRO-1 also divides the 12 bytes of optimizer state over dp.
        Parameters and gradients have 2 bytes each.
=> (2 + 2 + 12) / 2
    Layout A: ZeRO-1 divides the optimizer state alone over dp.
        Parameters and gradients stay full on each replica.
in_flight, layers = 4, 80 / 4 => in_flight, layers = 4, 80
    Layout A: these are the activations of 80 layers.
        A stage has 80/p.
(34 + 5 * heads * s / h) / 8 => (34 + 5 * heads * s / h)
    Layout A: your activations are eight times too many.
        With sequence parallelism all of them are divided by t = 8, and under 1F1B the first rank keeps p = 4
        microbatches, not all 32.

in layout B:
(32 + 8 - 1) => 32
    Layout B: you divided by m = 32, the useful part of the step.
        The bubble is a fraction of the step: of m + p - 1.
=> (2 * 32 + 8 - 1)
    Layout B: the sequences are shared by the replicas.
        So each has 32 microbatches.
(8 - 1) / (32 + 8 - 1) => 8 / (32 + 8)
    Layout B: you count p units until the pipeline is full.
        They are p - 1: the first microbatch is work.
=> (4 - 1) / (32 + 4 - 1)
    Layout B: that is the bubble of four stages.
        B has eight.
=> 100 * (8 - 1) / (32 + 8 - 1)
    Layout B: that is in per cent.
        Return a fraction.

in layout C:
2 * (4 - 1) / 4 => (4 - 1) / 4
    Layout C: that is the reduce-scatter of the gradients alone.
        ZeRO-1 all-gathers as many bytes of parameters.
=> 2
    Layout C: you count the full array each way.
        A ring sends (d-1)/d of it: a rank keeps the chunk that it reduces.
2 * billions => 4 * billions
    Layout C: that is twice too much.
        A gradient is sent in 16 bits, and a rank holds 1/(t·p) of the parameters.
=> 16 * 2 * billions
    Layout C: that is 16 times too much.
        Gradients are sent once per step, and a rank holds 1/16 of the parameters.
/ (2 * 8) => / 2
    Layout C: a rank holds 1/(t·p) of the parameters.
        Tp also divides them.
2 * (4 - 1) / 4 => 2 * (2 - 1) / 2
    Layout C: that is right for half as many replicas.
        C has d = 4.
"""

OTHER_LAYOUTS = (
    Layout(pp=8, tp=8, microbatches=64, **SLIM),
    Layout(2, 8, 4, microbatches=32, zero=1, schedule="interleaved", stages_per_rank=2, **SLIM),
)

# Where the program and the hints have the number of replicas, and of their microbatches.
REPLICAS = (
    r"dp=(\d+)",
    r"12\)? / (\d+)",
    r"c = (?:2 \* )?\((\d+) - 1\)",
    r"c = (?:2 \* )?\(\d+ - 1\) / (\d+)",
    r"\bd = (\d+)",
    r"\((\d+) \* 32",
)
MICROBATCHES = r"microbatches=(\d+)", r"(\d+) \+ [48]\b", r"\bm = (\d+)", r"(?:/|all|has) (32)\b"

TASK = """
The cluster has {gpus} GPUs, and the global batch {sequences} sequences: {replicas:g} times as many replicas as in the
table, each with {more:g} times as many microbatches. So the colleagues' layouts are {layouts}.
"""


def scaled(text: str, patterns: tuple[str, ...], factor: float) -> str:
    """The text, in which the numbers that these patterns find are so many times as large."""

    def larger(found: re.Match) -> str:
        start, end = found.start(1) - found.start(), found.end(1) - found.start()
        return f"{found[0][:start]}{factor * int(found[1]):g}{found[0][end:]}"

    for pattern in patterns:
        text = re.sub(pattern, larger, text)
    return text


def row(replicas: float = 1, more: float = 1) -> Exercise:
    """The exercise with so many times the replicas, and so many times the microbatches in each."""
    task = Task(int(64 * replicas), int(64 * replicas * more))

    def of_row(text: str) -> str:
        return scaled(scaled(text, REPLICAS, replicas), MICROBATCHES, more)

    def larger(layout: Layout) -> Layout:
        return replace(layout, dp=int(replicas * layout.dp), microbatches=int(more * layout.microbatches))

    def mistake_of_row(one: Mistake) -> Mistake:
        wrong = replace(one.wrong, text=of_row(one.wrong.text))
        return replace(one, wrong=wrong, hint=of_row(one.hint), repair=of_row(one.repair))

    program = Edited(__name__, of_row(inspect.getsource(choose_layout)), "choose_layout").load()
    ruled_out = tuple(map(larger, RULED_OUT))
    names = zip("ABC", ruled_out, strict=True)
    layouts = ", ".join(f"{name} dp = {x.dp} with m = {x.microbatches}" for name, x in names)
    made = exercise(
        globals() | {"compared": partial(compared, task=task)},
        points=4,
        right=(
            program if task != BOOK else choose_layout,
            *(but(larger(other), program) for other in OTHER_LAYOUTS),
            partial(by_the_bill, ruled_out, task),
        ),
        edited=(choose_layout,),
        inputs=lambda generator, n: [{"known": known}],
        withheld=("known",),
        ranks=(1,),
        parts=PARTS,
        task=" ".join(TASK.format(**task._asdict(), replicas=replicas, more=more, layouts=layouts).split()),
    )
    mistakes = tuple(map(mistake_of_row, made.mistakes))
    # The numbers of the right program and of each wrong one, for each of the colleagues' layouts.
    known = [*zip(program(), *(m.wrong.load()() for m in mistakes if m.about != ALL), strict=True)][1:]
    return replace(made, mistakes=mistakes)


EXERCISE = with_variants(replace(row(), task=""), row(replicas=2, more=1.5), row(replicas=4, more=1.25))
