"""13.6: a layout for 70B parameters on 64 GPUs, and the numbers that rule out three others."""

from __future__ import annotations

from collections.abc import Callable

from course.check.bill import ALL_HOLD, bill, costs_of, exceeded
from course.check.exercise import SEEN, Data, Exercise, Mistake, known_number, several
from lib.cost.sizes import MODELS
from lib.layout import Layout
from lib.mesh import Group

PARTS = CHOICE, MEMORY, BUBBLE, BYTES = (
    "your layout",
    "layout A, GB on the GPU with the highest peak",
    "layout B, the bubble",
    "layout C, GB of gradients to other nodes",
)
BILLIONS = MODELS["70B"].num_parameters / 1e9
SLIM = {"sequence_parallel": True, "recompute": "selective"}
CHOSEN = Layout(dp=2, pp=4, tp=8, microbatches=32, zero=1, **SLIM)
RULED_OUT = (
    Layout(dp=2, pp=4, tp=8, microbatches=32, zero=1, sequence_parallel=True),
    Layout(dp=2, pp=8, tp=4, microbatches=32, zero=1, **SLIM),
    Layout(dp=4, pp=2, tp=8, microbatches=16, zero=1, **SLIM),
)


def body(answer: Callable, group: Group, given: Data) -> Data:
    layout, *numbers = several(answer(), len(PARTS))
    found: Data = {
        CHOICE: exceeded(layout) if isinstance(layout, Layout) else "nothing" if layout is None else "no layout"
    }
    if isinstance(layout, Layout) and found[CHOICE] != ALL_HOLD:
        found[CHOICE + SEEN] = bill(layout)
    programs = (EXERCISE.right[0], *(m.wrong for m in EXERCISE.mistakes if m.about != ("",)))
    _, *columns = zip(*(program() for program in programs), strict=True)
    return found | {
        part: known_number(x, column) for part, x, column in zip(PARTS[1:], numbers, columns, strict=True)
    }


# ---- right programs -------------------------------------------------------------------------------------------------


def memory(per_parameter=2 + 2 + 12 / 2, per_element=34 + 5 * 64 * 4096 / 8192, t=8, layers=20, in_flight=4):
    """GB of model states, and of activations."""
    return BILLIONS * per_parameter / 32 + per_element * 4096 * 8192 / t * layers * in_flight / 1e9


def bubble(p=8, m=32):
    return (p - 1) / (m + p - 1)


def gradients(ways=2, d=4, gigabytes=2 * BILLIONS / (2 * 8)):
    return ways * (d - 1) / d * gigabytes


def choose(layout=CHOSEN, **wrong):
    """This layout, and the three numbers; `a`, `b` and `c` replace one."""
    right = {"a": memory(), "b": bubble(), "c": gradients()}
    return lambda: (layout, *(right | wrong).values())


def by_the_bill():
    """With replicas inside a node; rounded."""
    layout = Layout(
        dp=2, pp=8, tp=4, order="pp,dp,tp", microbatches=32, schedule="interleaved", stages_per_rank=5, **SLIM
    )
    a, b, c = map(costs_of, RULED_OUT)
    return [layout, round(a.memory_bytes / 1e9), round(b.bubble, 3), round(c.over_dp / 1e9, 1)]


# ---- wrong programs -------------------------------------------------------------------------------------------------


def layouts(hint: str, layout: object) -> Mistake:
    return Mistake(hint, choose(layout), about=(CHOICE,))


def numbers(hint: str, part: str, **wrong: float) -> Mistake:
    return Mistake(f"{part.partition(',')[0].capitalize()}: {hint}", choose(**wrong), about=(part,))


EXERCISE = Exercise(
    id="13.6",
    title="choose_layout",
    points=4,
    body=body,
    inputs=lambda generator, n: [{}],
    ranks=(1,),
    parts=PARTS,
    right=(
        choose(),
        choose(Layout(pp=8, tp=8, microbatches=64, **SLIM)),
        choose(Layout(2, 8, 4, microbatches=32, zero=1, schedule="interleaved", stages_per_rank=2, **SLIM)),
        by_the_bill,
    ),
    mistakes=(
        Mistake("Return four things: a Layout, and one number for each of A, B and C.", lambda: CHOSEN),
        layouts("You did not return a Layout. Return one, such as Layout(dp=2, pp=2, tp=2, zero=1).", {}),
        layouts(
            "The degrees do not multiply to the cluster. Every GPU has one place on each axis.",
            Layout(dp=2, pp=2, tp=8, microbatches=32, **SLIM),
        ),
        layouts(
            "Something cannot be shared out evenly. Stages take whole layers, tp ranks whole heads, and dp ranks equal "
            "numbers of microbatches of equal size.",
            Layout(dp=1, pp=32, tp=2, microbatches=64, **SLIM),
        ),
        layouts(
            "The bill has closed forms only for 1f1b, interleaved and gpipe. Choose one of them.",
            Layout(dp=2, pp=4, tp=8, microbatches=32, schedule="zb-h1", sequence_parallel=True),
        ),
        layouts(
            "A tensor-parallel group reaches over several nodes. It sends activations four times or more per layer and "
            "microbatch, and waits for each: that needs the links inside a node. Make tp smaller, or put it last in "
            "`order`.",
            Layout(dp=2, pp=2, tp=16, microbatches=32, zero=1, **SLIM),
        ),
        layouts(
            "The optimizer state alone does not fit: 12 of the 16 bytes per parameter. tp and pp divide it; dp does "
            "not, unless ZeRO shards it.",
            Layout(dp=8, tp=8, microbatches=8, **SLIM),
        ),
        layouts(
            "Parameters, gradients and optimizer state do not fit, before there is any activation. tp and pp divide "
            "all three; ZeRO-1 divides the optimizer state over dp as well.",
            Layout(dp=16, pp=2, tp=2, microbatches=4, zero=1, **SLIM),
        ),
        layouts(
            "Model states fit, activations do not. Under 1F1B a rank keeps up to p microbatches, so more stages do "
            "not help the first. Sequence parallelism, selective recomputation, a smaller microbatch or a larger "
            "tp do; GPipe keeps all microbatches.",
            Layout(dp=2, pp=4, tp=8, microbatches=32, zero=1),
        ),
        layouts(
            "It fits, but the GPUs wait too long: (p-1)/v of m + (p-1)/v units. Take fewer stages, more microbatches, "
            "or several stages per rank. dp and m share 64 sequences: fewer replicas leave more microbatches to each.",
            Layout(dp=2, pp=8, tp=4, microbatches=32, zero=1, **SLIM),
        ),
        layouts(
            "Too much is sent between nodes: ZeRO-2 reduce-scatters the gradients of every microbatch. With a pipeline "
            "there are many of them; zero=1 sends them once per step.",
            Layout(dp=2, pp=4, tp=8, microbatches=32, zero=2, **SLIM),
        ),
        layouts(
            "Too many bytes of gradients are sent between nodes. A dp rank sends about 2(d-1)/d of its gradients: more "
            "stages, or a larger tp, leave it fewer parameters, and fewer replicas a smaller factor.",
            Layout(dp=4, pp=2, tp=8, microbatches=16, zero=1, **SLIM),
        ),
        layouts(
            "Too many bytes of activations are sent between stages. Each of v stages per rank sends every microbatch, "
            "and without sequence parallelism each tp rank sends the same full tensor.",
            Layout(pp=8, tp=8, microbatches=64, schedule="interleaved", stages_per_rank=5, recompute="selective"),
        ),
        numbers(
            "these are the activations of one microbatch. Under 1F1B the first of p ranks keeps p of them.",
            MEMORY,
            a=memory(in_flight=1),
        ),
        numbers(
            "that would fit, because the attention matrices are missing: 5as/h of the 34 + 5as/h bytes. Without "
            "recomputation they are kept.",
            MEMORY,
            a=memory(per_element=34),
        ),
        numbers("that is the activations alone. Add the model states.", MEMORY, a=memory(per_parameter=0)),
        numbers(
            "ZeRO-1 divides the 12 bytes of optimizer state over dp as well. Parameters and gradients have 2 bytes "
            "each.",
            MEMORY,
            a=memory(per_parameter=16),
        ),
        numbers(
            "ZeRO-1 divides the optimizer state alone over dp: parameters and gradients stay full on each replica.",
            MEMORY,
            a=memory(per_parameter=16 / 2),
        ),
        numbers("these are the activations of 80 layers. A stage has 80/p.", MEMORY, a=memory(layers=80)),
        numbers(
            "your activations are eight times too many. With sequence parallelism all of them are divided by t = 8, "
            "and under 1F1B the first rank keeps p = 4 microbatches, not all 32.",
            MEMORY,
            a=memory(t=1),
        ),
        numbers(
            "you divided by m = 32, the useful part of the step. The bubble is a fraction of the step: of m + p - 1.",
            BUBBLE,
            b=7 / 32,
        ),
        numbers(
            "the 64 sequences are shared by two replicas, so each has 32 microbatches.",
            BUBBLE,
            b=bubble(m=64),
        ),
        numbers("p stages take p - 1 units to fill: the first microbatch is work.", BUBBLE, b=8 / 40),
        numbers("that is the bubble of four stages. B has eight.", BUBBLE, b=bubble(p=4)),
        numbers("return a fraction, not per cent.", BUBBLE, b=100 * bubble()),
        numbers(
            "that is the reduce-scatter of the gradients alone. ZeRO-1 also all-gathers the parameters, as many bytes "
            "again.",
            BYTES,
            c=gradients(ways=1),
        ),
        numbers(
            "a ring sends (d-1)/d of the bytes each way: a rank keeps the chunk that it reduces.",
            BYTES,
            c=gradients() * 4 / 3,
        ),
        numbers(
            "that is twice too much. A gradient is sent in 16 bits, and a rank holds 1/(t·p) of the parameters.",
            BYTES,
            c=2 * gradients(),
        ),
        numbers(
            "that is 16 times too much. Gradients are sent once per step, not for each of the 16 microbatches, and a "
            "rank holds 1/16 of the parameters.",
            BYTES,
            c=16 * gradients(),
        ),
        numbers("a rank holds 1/(t·p) of the parameters: tp also divides them.", BYTES, c=8 * gradients()),
        numbers(
            "d = 4 here: the replicas of C are four. With two a rank would send that much.", BYTES, c=gradients(d=2)
        ),
    ),
)
