"""Answers to the exercises of chapter 14: right ones, and one for each mistake that has a name."""

from functools import partial
from statistics import fmean, median

import numpy as np

from lib.planner import Choices, Layout4D, best_layouts, memory_bytes, step_s
from lib.planner.memory import fits
from lib.planner.presets import SHARES, stack_for
from lib.planner.search import all_layouts, why_slower
from lib.planner.seconds import Seconds

# ---- 14.1


def uneven_step(
    blocks,
    block_s,
    head_s,
    message_s,
    m,
    sums_s,
    hidden_s,
    heads=lambda p: [0] * (p - 1) + [1],
    messages=lambda p: 2 * (p > 1),
    pace=max,
    fill=lambda stages, m: sum(stages) - max(stages),
    exposed=lambda sums, hidden: max(0, sums - hidden),
):
    """The answer to 14.1, with a place for each mistake."""
    p = len(blocks)
    stages = [b * block_s + n * head_s + messages(p) * message_s for b, n in zip(blocks, heads(p), strict=True)]
    return m * pace(stages) + fill(stages, m) + exposed(sums_s, hidden_s)


def uneven(**wrong):
    return lambda *given: uneven_step(*given, **wrong)


def right_step_by_a_walk(blocks, block_s, head_s, message_s, m, sums_s, hidden_s):
    """The first microbatch passes all ranks, each later one adds the slowest."""
    stages = np.array(blocks) * block_s
    stages[-1] += head_s
    if len(blocks) > 1:
        stages += 2 * message_s
    seconds = stages.sum() + (m - 1) * stages.max()
    return seconds if hidden_s > sums_s else seconds + sums_s - hidden_s


def right_step_of_the_last_rank(blocks, block_s, head_s, message_s, m, sums_s, hidden_s):
    crossings = 2 * message_s if blocks[1:] else 0
    *others, last = (n * block_s + crossings for n in blocks)
    return (last + head_s) * m + sum(others) + (sums_s > hidden_s) * (sums_s - hidden_s)


# ---- 14.2

BLOCK, END = 12 * 8192**2 + 13 * 8192, 2**17 * 8192  # parameters
TOKEN_S = 4096 * 8192 / 1e9
SPARE = stack_for("megatron", "h100").spare_activations


def fullest_ranks(a=None, b=None, c=None, narrow=2, ends=1, spare=SPARE):
    """The answer to 14.2; `a`, `b` and `c` replace entries of a layout."""
    states = [(blocks * BLOCK + ends * END) / t / 1e9 for blocks, t in ((8, 8), (16, 8), (16, 4))]
    rows = [
        ["first", states[0] * 18, spare * 4 * 8 * 34 * TOKEN_S / 8, 0],
        ["first", states[1] * 9, spare * 4 * (1 + 3 / 16) * 16 * 34 * TOKEN_S / 8, 0],
        ["last", states[2] * 9, spare * (16 * 2 + 34) * 2 * TOKEN_S / 4, 14 * 2 * 4096 * 2**17 / 4 / 1e9],
    ]
    for row, changes in zip(rows, (a, b, c), strict=True):
        for i, change in (changes or {}).items():
            row[i] = change(row[i]) if callable(change) else change
    return rows


def bytes_but(**wrong):
    return lambda: fullest_ranks(**wrong)


def right_bytes_on_paper():
    """To three digits."""
    return ("first", 16.9, 4.56, 0), ("first", 15.7, 10.8, 0), ("last", 31.4, 1.11, 3.76)


def right_bytes_of_numpy():
    return [[str(end).upper(), *map(np.float32, numbers)] for end, *numbers in fullest_ranks()]


def in_each(i, change, names="abc"):
    return [bytes_but(**{name: {i: change}}) for name in names]


def states_as(bytes_of, names="abc"):
    """Another number of bytes per parameter."""
    right, dp = {"a": 18, "b": 9, "c": 9}, {"a": 2, "b": 4, "c": 4}
    return [bytes_but(**{n: {1: lambda x, n=n: x / right[n] * bytes_of(right[n], dp[n])}}) for n in names]


def without_ends(name):
    i = "abc".index(name)
    return bytes_but(**{name: {1: fullest_ranks(ends=0)[i][1]}})


# ---- 14.3

BROKEN = [
    Layout4D(8, 1, 2, 4, 1, 1, 1, True),
    Layout4D(4, 1, 8, 2, 1, 1, 1, True),
    Layout4D(2, 1, 2, 16, 4, 1, 1, True),
    Layout4D(16, 1, 2, 2, 1, 1, 1, True),
    Layout4D(8, 1, 1, 8, 2, 1, 0, True),
    Layout4D(2, 1, 8, 4, 4, 1, 1, True),
]
WORDS = ["heads", "layers", "batch", "node", "states", "activations"]
CHANGES = [{"tp": 2}, {"pp": 2}, {"rows": 1}, {"tp": 4}, {"zero": 1}, {"rows": 1}]


def repairs(words=None, changes=None):
    """The answer to 14.3, with other words or changes at these places."""
    words = [(words or {}).get(i, word) for i, word in enumerate(WORDS)]
    changes = [(changes or {}).get(i, change) for i, change in enumerate(CHANGES)]
    return [(word, layout._replace(**change)) for word, layout, change in zip(words, BROKEN, changes, strict=True)]


def repairing(**wrong):
    return lambda: repairs(**wrong)


def right_repairs_with_replicas():
    """dp as it follows, as plain tuples."""
    pairs = repairs(changes={4: {"pp": 4, "dp": 2}, 1: {"pp": 4, "dp": 4}})
    return tuple((word.upper(), tuple(layout)) for word, layout in pairs)


# ---- 14.4

FACTORS = {
    "tp": lambda row: row["tp"] / 2,
    "attention": lambda row: 2 if row["flash"] else 1,
    "bubble": lambda row: row["interleave"],
    "dp": lambda row: row["microbatches"],
    "matmuls": lambda row: 0.75 if row["recompute"] == "full" else 1,
    "memory": lambda row: 0.4,
    "nothing": lambda row: 1,
}


def wrong_term(
    rows,
    score=lambda errors, rows: median(map(abs, errors)),
    undo=lambda factor: 1 / factor,
    terms=tuple(FACTORS),
):
    """The answer to 14.4, with a place for each mistake."""

    def errors(term):
        for row in rows:
            seconds = dict(row["seconds"])
            if term != "nothing":
                seconds[term] *= undo(FACTORS[term](row))
            yield sum(seconds.values()) / row["step_s"] - 1

    return min(terms, key=lambda term: score(list(errors(term)), rows))


def finding(**wrong):
    return lambda rows: wrong_term(rows, **wrong)


right_term_by_mean = finding(score=lambda errors, rows: fmean(map(abs, errors)))


def right_term_by_counting(rows):
    """How many runs are met within 4 %."""
    return np.str_(wrong_term(rows, score=lambda errors, rows: fmean(min(abs(e), 0.1) for e in errors)))


# ---- 14.5


def calibrate(rows, weight=lambda row: 1 / row["measured"]):
    """Least squares: a step is linear in 1/share and the exposed fraction."""
    w = np.array([weight(row) for row in rows])
    parts = np.array([(row["matmuls"], row["tp"]) for row in rows]) * w[:, None]
    wanted = np.array([row["measured"] - row["rest"] for row in rows]) * w
    (slowdown, exposed), *_ = np.linalg.lstsq(parts, wanted, rcond=None)
    return 1 / slowdown, exposed


def right_calibration_one_after_the_other(rows):
    """The share where there are no sums; then the fraction where there are most."""
    alone = [row for row in rows if row["tp"] == 0]
    most = sorted(rows, key=lambda row: row["tp"] / row["measured"])[-2:]
    slowdown = fmean((row["measured"] - row["rest"]) / row["matmuls"] for row in alone)
    left = [(row["measured"] - row["rest"] - slowdown * row["matmuls"]) / row["tp"] for row in most]
    return [1 / slowdown, fmean(left)]


def right_calibration_by_trying(rows):
    """A grid, by the largest relative error."""

    def worst(pair):
        share, exposed = pair
        said = (row["matmuls"] / share + exposed * row["tp"] + row["rest"] for row in rows)
        return max(abs(s / row["measured"] - 1) for s, row in zip(said, rows, strict=True))

    return np.array(min(((i / 200, j / 50) for i in range(80, 181) for j in range(51)), key=worst))


def share_alone(rows, exposed):
    left = (row["measured"] - row["rest"] - exposed * row["tp"] for row in rows)
    return 1 / fmean(s / row["matmuls"] for s, row in zip(left, rows, strict=True)), exposed


def calibration_but(change):
    return lambda rows: change(*calibrate(rows))


# ---- 14.6


def least_regret(trainings, able=None, layout=None, reason=None, score=max):
    """The answer to 14.6, with a place for each mistake."""
    able = able or (lambda one: all(fits(run, one) for run in trainings))
    layouts = [one for one in all_layouts(trainings[0], Choices()) if able(one)]
    times = [{one: step_s(run, one).total for one in layouts} for run in trainings]
    bests = [min(seconds, key=seconds.get) for seconds in times]

    def regrets(one):
        return [seconds[one] / seconds[best] for seconds, best in zip(times, bests, strict=True)]

    chosen = layout(bests) if layout else min(layouts, key=lambda one: score(regrets(one)))
    kinds = [step_s(trainings[1], best) for best in bests]
    lost = {what: a - b for what, a, b in zip(Seconds._fields, *kinds, strict=True)}
    return chosen, reason(kinds[0], lost) if reason else max(lost, key=lost.get)


def choosing(**wrong):
    return lambda trainings: least_regret(trainings, **wrong)


def right_choice_by_lists(trainings):
    """By the planner's own lists, as plain tuples."""
    lists = [{one.layout: one for one in best_layouts(run, best=10_000)} for run in trainings]
    fastest = [next(iter(found.values())).seconds.total for found in lists]
    both = [one for one in lists[0] if one in lists[1]]
    layout = min(both, key=lambda one: max(lists[i][one].seconds.total / fastest[i] for i in (0, 1)))
    winner = next(iter(lists[0]))
    if winner not in lists[1]:
        return least_regret(trainings)
    first_in_second, second = lists[1][winner], next(iter(lists[1].values()))
    return list(layout), why_slower(second, first_in_second).rpartition("more for ")[2]


def right_choice_of_a_plain_tuple(trainings):
    layout, reason = least_regret(trainings)
    return tuple(layout), np.str_(reason)


def changed(**fields):
    def answer(trainings):
        layout, reason = least_regret(trainings)
        return layout._replace(**fields), reason

    return answer


def replicas_of_all(trainings):
    """ZeRO-3 with a pipeline."""
    gpus = trainings[0].cluster.gpus
    return Layout4D(1, 1, 4, gpus // 4, 1, 1, 3), "dp"


def too_large(trainings):
    layouts = [one for one in all_layouts(trainings[0], Choices()) if one.tp <= 8 and not fits(trainings[0], one)]
    return max(layouts, key=lambda one: memory_bytes(trainings[0], one).total), "dp"


def over_nodes(trainings):
    gpus = trainings[0].cluster.gpus
    return Layout4D(16, 1, 1, gpus // 16, 1, 1, 1, True), "tp"


def slow(trainings):
    """Fits, and is slow in both cases."""
    layouts = [one for one in all_layouts(trainings[0], Choices()) if one.tp <= 8]
    fit = [one for one in layouts if all(fits(run, one) for run in trainings)]
    return max(fit, key=lambda one: step_s(trainings[0], one).total), "dp"


RIGHT = {
    "14.1": [uneven_step, right_step_by_a_walk, right_step_of_the_last_rank],
    "14.2": [fullest_ranks, right_bytes_on_paper, right_bytes_of_numpy],
    "14.3": [repairs, right_repairs_with_replicas],
    "14.4": [wrong_term, right_term_by_mean, right_term_by_counting],
    "14.5": [calibrate, right_calibration_one_after_the_other, right_calibration_by_trying],
    "14.6": [least_regret, right_choice_by_lists, right_choice_of_a_plain_tuple],
}
WRONG = {  # in the order of the exercise's mistakes
    "14.1": [
        uneven(heads=lambda p: [1] * p),
        uneven(heads=lambda p: [0] * p),
        uneven(pace=fmean),
        uneven(fill=lambda stages, m: 0),
        uneven(fill=lambda stages, m: (len(stages) - 1) * max(stages)),
        uneven(fill=lambda stages, m: (len(stages) - 1) * stages[0]),
        uneven(fill=lambda stages, m: sum(stages)),
        uneven(fill=lambda stages, m: m * (sum(stages) - max(stages))),
        uneven(messages=lambda p: 0),
        uneven(messages=lambda p: p > 1),
        uneven(messages=lambda p: 2),
        uneven(exposed=lambda sums, hidden: sums),
        uneven(exposed=lambda sums, hidden: sums - hidden),
        uneven(exposed=lambda sums, hidden: 0),
    ],
    "14.2": [
        *in_each(0, "last", "ab"),
        *in_each(0, "first", "c"),
        *states_as(lambda all_, dp: all_ - 2),
        *map(without_ends, "abc"),
        *states_as(lambda all_, dp: 18 / dp, "abc"),
        *states_as(lambda all_, dp: 18, "bc"),
        *in_each(2, lambda x: 2 * x, "a"),
        *in_each(2, lambda x: x / (1 + 3 / 16), "b"),
        *in_each(2, lambda x: x / (1 + 3 / 16) * 8, "b"),
        bytes_but(a={2: lambda x: x / 8}),
        bytes_but(b={2: lambda x: x / 8}),
        bytes_but(c={2: lambda x: x / 4}),
        *in_each(2, lambda x: x / 4, "a"),
        *in_each(2, lambda x: x / 4.75, "b"),
        *in_each(2, SPARE * 16 * 34 * 2 * TOKEN_S / 4, "c"),
        *in_each(2, SPARE * 32 * 2 * TOKEN_S / 4, "c"),
        *in_each(2, SPARE * (4 * 32 + 34) * 2 * TOKEN_S / 4, "c"),
        *in_each(3, lambda x: 4 * x, "c"),
        *in_each(3, lambda x: x / 7, "c"),
        *in_each(3, 14 * 4096 * 2**17 / 8 / 1e9, "ab"),
    ],
    "14.3": [
        lambda: WORDS,
        repairing(words={2: "sequences"}),
        repairing(words={0: "states"}),
        repairing(words={5: "batch"}),
        repairing(words={1: "heads"}),
        repairing(words={4: "activations"}),
        lambda: [(word, change) for word, change in zip(WORDS, CHANGES, strict=True)],
        repairing(changes={0: {"dp": 8}}),
        repairing(changes={4: {"zero": 1, "recompute": "full"}}),
        repairing(changes={1: {"pp": 16}}),
        repairing(changes={3: {"tp": 2}}),
        repairing(changes={5: {"recompute": "full"}}),
    ],
    "14.4": [
        lambda rows: max(Seconds._fields, key=lambda kind: sum(row["seconds"][kind] for row in rows)),
        finding(score=lambda errors, rows: abs(errors[0])),
        finding(score=lambda errors, rows: max(map(abs, errors))),
        finding(score=lambda errors, rows: abs(median(errors))),
        finding(score=lambda errors, rows: sum(abs(e * row["step_s"]) for e, row in zip(errors, rows, strict=True))),
        finding(terms=tuple(FACTORS)[:-1]),
        finding(undo=lambda factor: factor),
    ],
    "14.5": [
        lambda rows: calibrate(rows)[0],
        calibration_but(lambda share, exposed: (exposed, share)),
        partial(calibrate, weight=lambda row: 1),
        calibration_but(lambda share, exposed: (1 / share, exposed)),
        calibration_but(lambda share, exposed: (share, 1 / exposed)),
        lambda rows: (SHARES["a100"][0], 0.3),
        partial(share_alone, exposed=0),
        partial(share_alone, exposed=1),
        calibration_but(lambda share, exposed: (0.9 * share, exposed)),
        calibration_but(lambda share, exposed: (share, 0.3 * exposed)),
    ],
    "14.6": [
        lambda trainings: least_regret(trainings)[0],
        lambda trainings: ("dp", least_regret(trainings)[0]),
        changed(dp=3),
        over_nodes,
        replicas_of_all,
        too_large,
        choosing(layout=lambda bests: bests[0]),
        choosing(layout=lambda bests: bests[1]),
        choosing(score=sum),
        slow,
        choosing(reason=lambda kinds, lost: "network"),
        choosing(reason=lambda kinds, lost: max(Seconds._fields, key=lambda what: getattr(kinds, what))),
        choosing(reason=lambda kinds, lost: "optimizer"),
    ],
}
