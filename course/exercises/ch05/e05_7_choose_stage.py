"""05.7: the way of sharding, and the number of microbatches, that fit and send least; and a number against another."""

import random
from collections import namedtuple
from functools import partial
from itertools import product

import torch

from course.check.compare import SEEN, same
from course.check.edits import exercise
from course.check.exercise import known_number, several, whole, word
from lib.cost import state_bytes, zero_wire_bytes
from lib.cost.sizes import RECIPES

PARTS = CHOICE, SENT, DEFENCE = ("the choice", "the bytes", "the defence")
HOLDS, TOLD = "right", "all that the answer returned"
PLAIN, ONE, TWO, TWO_ONCE = "plain", "zero-1", "zero-2", "zero-2, once"
THREE, THREE_ONCE, THREE_KEPT = "zero-3", "zero-3, once", "zero-3, kept"
STAGES = {PLAIN: 0, ONE: 1, TWO: 2, TWO_ONCE: 2, THREE: 3, THREE_ONCE: 3, THREE_KEPT: 3}
ONCE = (TWO_ONCE, THREE_ONCE)  # full gradients until the last microbatch


# A model and a cluster, as an answer gets them.
Case = namedtuple("Case", "parameters unit root n sequences sequence_bytes room_bytes")


def inputs(generator, n):
    rng, cases = random.Random(whole(generator, 0, 2**40)), []
    for billions, ranks, sequences in product(range(3, 37, 3), (16, 128), (16, 64)):
        layers = rng.randrange(40, 81)
        unit = round(billions * 1e9 * rng.uniform(0.94, 0.97) / layers)
        root, activations = billions * 10**9 - layers * unit, round(1e9 * 2 ** rng.uniform(-1, 4))
        case = Case(billions * 10**9, unit, root, ranks, sequences, activations, 72 * 10**9)
        others = [one for one in choices(case) if ruled_out(case, *one)]
        way = rng.choice(sorted({way for way, _ in others}))  # each as often, also those with few m
        picked = rng.choice([one for one in others if one[0] == way])
        cases += [(case, one) for one in others if one in (picked, (THREE, 1))]
    cases = rng.sample(cases, len(cases))
    return [{"cases": cases, "right": [(by_search(*one)[2:], best_choices(one[0])) for one in cases]}]


def choices(case):
    """Each way with each number of microbatches of equal size."""
    return [(way, m) for way in STAGES for m in range(1, case.sequences + 1) if case.sequences % m == 0]


def memory_bytes(
    case, way, m, recipe="mixed Adam", shards=lambda stage: stage, units=2, root=1, buffers=1, rows=None, taken_for=()
):
    """The peak of a rank: model states, what is unsharded at work, activations of a microbatch."""
    way = dict(taken_for).get(way, way)
    held = state_bytes(case.parameters, RECIPES[recipe], zero=shards(STAGES[way]), dp=case.n)
    at_work, every = 2 * (root * case.root + units * case.unit), 2 * case.parameters
    if STAGES[way] == 3:
        held["parameter"] += every if way == THREE_KEPT else at_work
    if way in ONCE:
        held["gradient"] = every
    elif STAGES[way] >= 2:
        held["gradient"] += buffers * at_work
    rows = rows(case, m) if rows else case.sequences / m  # of a microbatch
    return sum(held.values()) + rows * case.sequence_bytes


def sent_bytes(case, way, m):
    how = {"microbatches": m, "reduce_each": way not in ONCE, "reshard": way != THREE_KEPT}
    return zero_wire_bytes(STAGES[way], 2 * case.parameters, case.n, **how)


def fits(case, way, m):
    return memory_bytes(case, way, m) <= case.room_bytes


def least_bytes(case):
    return min(sent_bytes(case, *one) for one in choices(case) if fits(case, *one))


def ruled_out(case, way, m):
    """By its memory or by its bytes, and not by both."""
    sent, least = sent_bytes(case, way, m), least_bytes(case)
    return sent > 1.001 * least if fits(case, way, m) else sent < 0.999 * least


def best_choices(case):
    least = least_bytes(case)
    return [title(*one) for one in choices(case) if fits(case, *one) and sent_bytes(case, *one) <= 1.001 * least]


def title(way, m):
    return f"{way}, m = {m}"


def body(answer, group, given):
    each = (several(answer(case, proposed), 5) for case, proposed in given["cases"])
    return {TOLD: [[known_number(x, ()) for x in row] for row in each]}


def compared(told, given):
    found = {part: [] for part in PARTS}
    each = zip(told[TOLD], given["cases"], given["right"], strict=True)
    for (way, m, sent, why, number), (case, proposed), ((least, reason, by), best) in each:
        mine = title(word(way), known_number(m, range(1, case.sequences + 1)))
        judged = {
            CHOICE: (HOLDS if mine in best else mine, HOLDS),
            SENT: (known_number(sent, borrowed(least)), least),
            DEFENCE: ([word(why), known_number(number, borrowed(by))], [reason, by]),
        }
        for part, (what, right) in judged.items():
            found[part].append(what)
            if not same({part: what}, {part: right}):
                found.setdefault(part + SEEN, figures(case, mine, proposed))
    return found


def borrowed(n_bytes):
    """The number, also in units that people borrow: an answer may be rounded there."""
    return [n_bytes, n_bytes / 1e9, n_bytes / 2**30]


def figures(case, mine, proposed):
    """The case, and the costs of the answer's choice."""
    shown = [
        ", ".join(f"{name}={value:,}" for name, value in case._asdict().items()),
        f"proposed: {title(*proposed)}",
    ]
    for one in choices(case):
        if title(*one) == mine:
            needed, sent = (f(case, *one) / 1e9 for f in (memory_bytes, sent_bytes))
            shown.append(f"Your choice, {mine}, needs {needed:.1f} GB and sends {sent:.1f} GB.")
    return "\n".join(shown)


def against(proposed, mine, room):
    """What rules the proposed choice out: by how much it exceeds the memory, or sends more. Both are (memory, sent)."""
    return ("memory", proposed[0] - room) if proposed[0] > room else ("sent", proposed[1] - mine[1])


def answer(sent=sent_bytes, best=None, among=lambda case, way, m: True, defend=against, able_to=choices, **counted):
    """The answer, with a place for each mistake: `counted` in memory, and `best` is minimised instead of the bytes."""
    memory = partial(memory_bytes, **counted)

    def program(case, proposed):
        able = [one for one in able_to(case) if among(case, *one)]
        that_fit = [one for one in able if memory(case, *one) <= case.room_bytes] or able
        mine = min(that_fit, key=lambda one: (best or sent)(case, *one))
        costs = [(memory(case, *one), sent(case, *one)) for one in (proposed, mine)]
        return *mine, sent(case, *mine), *defend(*costs, case.room_bytes)

    return program


by_search = answer()


def on_paper(case, proposed):
    """By the formulas of the pages, in GB; the last of equals."""

    def costs(way, m):
        psi, n, at_work = case.parameters / 1e9, case.n, 2 * (case.root + 2 * case.unit) / 1e9
        sharded = psi / n
        gigabytes, units = {
            PLAIN: (16 * psi, 2),
            ONE: (4 * psi + 12 * sharded, 2),
            TWO: (2 * psi + 14 * sharded + at_work, m + 1),
            TWO_ONCE: (4 * psi + 12 * sharded, 2),
            THREE: (16 * sharded + 2 * at_work, 3 * m),
            THREE_ONCE: (14 * sharded + 2 * psi + at_work, 2 * m + 1),
            THREE_KEPT: (16 * sharded + 2 * psi + at_work, 2 * m),
        }[way]
        return units * (n - 1) / n * 2 * psi, gigabytes + case.sequence_bytes / 1e9 * case.sequences / m

    room = case.room_bytes / 1e9
    that_fit = [(costs(*one)[0], one) for one in reversed(choices(case)) if costs(*one)[1] <= room]
    least, (way, m) = min(that_fit, key=lambda pair: pair[0])
    sent, gigabytes = costs(*proposed)
    why = ["memory", gigabytes - room] if gigabytes > room else ["sent", sent - least]
    return [way.upper(), torch.tensor(m), round(1e9 * least), why[0], 1.002e9 * why[1]]


def in_units(units):
    """Of some ways the wrong multiple of (n-1)/n · 2Ψ, a function of m."""

    def sent(case, way, m):
        one = 2 * case.parameters * (case.n - 1) / case.n
        return units[way](m) * one if way in units else sent_bytes(case, way, m)

    return answer(sent)


def in_units_of(of_sent, of_number):
    """The right answer, with the bytes sent and the bytes of the defence in borrowed units."""

    def program(case, proposed):
        way, m, sent, why, by = by_search(case, proposed)
        return way, m, sent / of_sent, why, by / of_number

    return program


def any_number(case):
    """Each way with each number of microbatches, also of different sizes."""
    return list(product(STAGES, range(1, case.sequences + 1)))


MISTAKES = """
lambda case, proposed: None
    Return five things: a way, m, the bytes sent, a word, a number of bytes.
answer(among=lambda case, way, m: way == THREE)
    You always take ZeRO-3.
        It needs the least memory and sends the most: 3 model sizes per microbatch. Where parameters fit on every rank,
        they need not travel so often.
answer(best=memory_bytes)
    You take the choice that needs least memory. What is left over buys nothing.
        Take what fits and sends least.
answer(best=lambda case, way, m: ([*STAGES].index(way), sent_bytes(case, way, m)))
    You take the first way in the list that fits. ZeRO-2 may fit with many small microbatches, each with a
    reduce-scatter, and ZeRO-3 in a few large ones.
        Compare m + 1 with 3m, each with its own m.
answer(among=lambda case, way, m: m == case.sequences)
    You take one sequence per microbatch. That needs the least memory for activations, but ZeRO-2 and ZeRO-3 send
    something for each microbatch.
        Take as few as fit.
answer(best=lambda case, way, m: (m, sent_bytes(case, way, m)))
    You take the fewest microbatches that fit.
        Plain data parallelism and ZeRO-1 send 2 model sizes with any number.
answer(shards=lambda stage: 3 if stage else 0)
    You count 16Ψ/n for each stage of ZeRO.
        Stage 1 shards the optimizer's 12 bytes, 2 also gradients, 3 parameters.
answer(shards=lambda stage: 0)
    You count 16Ψ for every way, as if nothing was sharded.
        Each stage divides its kinds of state by n.
answer(recipe="bf16 Adam, no master")
    You count 12 bytes per parameter.
        The master weights are missing, 4 bytes, sharded with the moments.
answer(taken_for={TWO_ONCE: TWO, THREE_ONCE: THREE})
    You shard gradients that are reduced once.
        They add up until the last microbatch: each rank holds all of them, 2Ψ.
answer(units=0, root=0)
    You leave out the root and two units.
        Which are unsharded at work, and their gradients.
answer(units=1)
    You count one unit at work.
        While it computes, the next one arrives: root + 2 units.
answer(root=0)
    You leave out the root.
        It is unsharded as long as a pass runs: root + 2 units.
answer(buffers=0)
    You leave out the gradients at work.
        Full until they are reduced: 2 bytes for the root and two units, in ZeRO-2 too.
answer(taken_for={THREE_KEPT: THREE})
    Units that are kept until backward are all unsharded at the end of forward.
        2Ψ, not the root and two units.
answer(rows=lambda case, m: case.sequences)
    You count the activations of all sequences of a step.
        A microbatch frees its activations in backward, so a rank holds those of one microbatch.
answer(rows=lambda case, m: 1)
    You count the activations of one sequence.
        A microbatch has sequences / m of them.
in_units({PLAIN: lambda m: 2 * m, ONE: lambda m: m + 1, TWO_ONCE: lambda m: m + 1, THREE_ONCE: lambda m: 3 * m})
    You let every way reduce its gradients after each microbatch.
        Full gradients add up: `"plain"`, `"zero-1"` and the ways with "once" reduce once per step.
in_units({TWO: lambda m: 2})
    You let ZeRO-2 send 2 model sizes.
        Without full gradients to add to, each microbatch reduce-scatters: m + 1 sizes.
in_units({THREE: lambda m: m + 2, THREE_ONCE: lambda m: 3, THREE_KEPT: lambda m: m + 1})
    You gather the parameters once per step under ZeRO-3.
        It frees them after each use, so each microbatch gathers them again: for forward and for backward, or once if
        they are kept in between.
in_units({THREE: lambda m: 2 * m + 1, THREE_KEPT: lambda m: m + 1})
    You let ZeRO-3 reduce once in each way.
        Without full gradients it reduces those of each microbatch.
in_units({THREE_KEPT: lambda m: 3 * m})
    You count both all-gathers where units are kept until backward.
        Backward finds them there: one all-gather and one reduce-scatter for each microbatch.
answer(sent=lambda case, *one: sent_bytes(case, *one) * case.n / (case.n - 1))
    A ring sends (n-1)/n of the array in each all-gather or reduce-scatter.
        One shard is there already.
answer(sent=lambda *one: 2 * sent_bytes(*one))
    You send 4 bytes per element.
        Parameters and gradients travel in bfloat16, 2 bytes.
answer(sent=lambda *one: sent_bytes(*one) / 2)
    You count elements, not bytes, in what is sent.
        Parameters and gradients travel in bfloat16, 2 bytes.
answer(able_to=any_number)
    Your microbatches are not of equal size: m does not divide case.sequences.
        Try only the divisors.
in_units_of(1e9, 1e9)
    You return gigabytes.
        Return bytes.
in_units_of(2**30, 2**30)
    You return GiB.
        Return bytes.
in_units_of(1e9, 1)
    You return the bytes that are sent in gigabytes.
        Return bytes there, too.
in_units_of(2**30, 1)
    You return the bytes that are sent in GiB.
        Return bytes there, too.
in_units_of(1, 1e9)
    You return the number of the defence in gigabytes.
        Return bytes there, too.
in_units_of(1, 2**30)
    You return the number of the defence in GiB.
        Return bytes there, too.
answer(defend=lambda *costs: (against(*costs)[0], -against(*costs)[1]))
    Your number against the proposed choice has the wrong sign.
        It says by how much the proposed choice exceeds the memory, or sends more than yours: both are positive.
answer(defend=lambda proposed, mine, room: ("memory", proposed[0]) if proposed[0] > room else ("sent", proposed[1]))
    You return all bytes of the proposed choice.
        Return by how much it exceeds the memory, or the bytes of your choice.
answer(defend=lambda proposed, mine, room: against(proposed, mine, mine[0] if proposed[0] > room else room))
    You compare the proposed memory with yours. More does not rule it out.
        Return by how much it exceeds `room_bytes`.
answer(defend=lambda proposed, mine, room: ("sent", proposed[1] - mine[1]))
    You compare the bytes sent, even where the proposed choice does not fit.
        There memory rules it out.
"""

EXERCISE = exercise(
    globals(),
    points=3,
    right=(by_search, on_paper),
    edited=(answer,),
    title="choose_stage",
    ranks=(1,),
    parts=PARTS,
    withheld=("right",),
)
