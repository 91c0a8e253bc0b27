"""Loops as people write them, on every wrapper: equal to one process, or refused in a sentence of ours."""

import os
import random
import sys
import time
from collections import Counter
from functools import partial

import cloudpickle
import pytest

from book.trials.habits import ALL, REFUSED, WORKS
from book.trials.loops import CLEAR, WRAPPERS, run_loop
from book.trials.loops_of_gpt import run_loop_of_gpt
from book.trials.net_of_loops import OPTIMIZERS
from lib.launch import run
from lib.layout import Layout
from tests.lib.sharding import said

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WALK_S = float(os.environ.get("FUZZ_S", 5))
SEED = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(10**9))
EQUAL = 1e-12
IN_A_RUN = 25
STYLES = {"ZeRO2": (3, 2, 2), "FSDP": (3, 2, 2), "NaiveDDP": (30, 1, 1), "NaiveZeRO1": (30, 1, 1)}  # of accumulation


def draw_loop(rng, kind):
    """Some windows, each with backwards that end in a step, in a skipped step, or in the middle."""
    loop = []

    def maybe(share, *operation):
        if rng.random() < share:
            loop.append(operation)

    def clear(share):
        if kind.startswith("Naive"):
            share = 1 - (1 - share) / 20
        if rng.random() < share:
            loop.append(("clear", rng.choice(list(CLEAR))))

    loop.append(("save",))
    for _ in range(rng.randint(2, 6)):
        clear(0.6)
        style = rng.choices(["no_sync", "sends", "finishes"], STYLES.get(kind, (30, 1, 3)))[0]
        microbatches = rng.choice([1, 1, 2, 3])
        is_cut = rng.random() < 0.15
        for k in range(microbatches):
            is_last = k == microbatches - 1
            how = "no_sync" if style == "no_sync" and (is_cut or not is_last) else "sends"
            between = rng.choice(list(CLEAR)) if rng.random() < 0.1 else None
            loop.append(("backward", how, between, rng.random() < 0.08))
            maybe(0.1, "look")
            if style == "finishes":
                loop.append(("finish",))
        if is_cut:
            clear(0.9)
            continue
        maybe(0.01, "torch_clip", 0.5)
        if rng.random() < 0.1:
            clear(1.0)  # a skip before finish
            continue
        loop.append(("finish",))
        maybe(0.1, "look")
        maybe(0.1, "freeze", rng.randrange(6), rng.random() < 0.5)
        maybe(0.01, "held_gradients")
        maybe(0.2 if kind.endswith("DDP") else 0.01, "torch_clip", 0.5)
        end = rng.choice(["clip and step", "step", "step", "skip", "if finite", "if finite"])
        if end == "clip and step":
            loop += [("clip", rng.choice([0.1, 1e9])), ("step",)]
        elif end == "step":
            loop.append(("step",))
        elif end == "if finite":
            loop.append(("clip_and_step_if_finite", rng.choice([0.1, 1e9]), rng.choice([None, *CLEAR])))
        else:
            clear(0.9)
        maybe(0.2, "schedule")
        maybe(0.1, "rate", rng.choice([0.5, 2.0]))
        maybe(0.2, "update_average")
        maybe(0.1, "swap")
        maybe(0.01 if kind == "FSDP" else 0.1, "average_in_place")
        maybe(0.01 if kind == "FSDP" else 0.1, "clamp")
        maybe(0.1, rng.choice(["save", "load"]))
        maybe(0.1, "freeze", rng.randrange(6), rng.random() < 0.5)
    if rng.random() < 0.03:
        loop += [("foreign_group",), ("backward", "sends"), ("finish",), ("step",)]
    return loop


def draw(seed):
    """(wrapper, optimizer, options, loop), from the seed alone."""
    rng = random.Random(seed)
    kind = rng.choice(list(WRAPPERS))
    options = {"op": rng.choice(["mean", "mean", "sum"]), "writes": rng.random() < 0.03}
    if kind in ("BucketedDDP", "ZeRO1", "ZeRO2"):
        options["bucket_bytes"] = rng.choice([1, 100, 2**20])
    if kind == "FSDP":
        options |= {"reshard_after_forward": rng.random() < 0.7, "prefetch": rng.random() < 0.7}
    return kind, rng.choice(list(OPTIMIZERS)), options, draw_loop(rng, kind)


LAYOUTS = {
    2: [
        *(Layout(dp=2, zero=zero, microbatches=m) for zero in (0, 1, 2, 3) for m in (1, 2)),
        *(Layout(tp=2, sequence_parallel=slices) for slices in (True, False)),
        *(Layout(pp=2, microbatches=m, zero=zero) for zero in (0, 1) for m in (2, 3)),
        Layout(pp=2, microbatches=2, schedule="zb-h1"),
    ],
    3: [Layout(dp=3, zero=zero) for zero in (0, 1, 2, 3)],
}
NOT_OF_GPT = {"save", "load", "freeze", "average_in_place", "clamp", "torch_clip", "held_gradients"}


def draw_of_gpt(seed, n):
    """(layout, optimizer, loop)."""
    rng = random.Random(seed)
    loop = [one for one in draw_loop(rng, "ZeRO2") if one[0] not in NOT_OF_GPT]
    return rng.choice(LAYOUTS[n]), rng.choice(list(OPTIMIZERS)), loop


def many(world, seeds):
    return [one(world, seed) for seed in seeds]


def one(world, seed):
    if seed % 5:
        return run_loop(world, *draw(seed))
    return run_loop_of_gpt(world, *draw_of_gpt(seed, world.size))


def shown(seed, n):
    return draw(seed) if seed % 5 else draw_of_gpt(seed, n)


REFUSALS = {  # name → (operations that may be refused so, sentence); a line of the page *Loops that work* each
    "finish() forgotten": ({"backward"}, "a backward was not followed by finish()"),
    "p.grad read before finish()": ({"torch_clip"}, "is not averaged yet: call finish() before"),
    "p.grad of a shard read": ({"torch_clip", "held_gradients"}, "has no gradient to read or write here"),
    "parameters of FSDP read or written": (
        {"average_in_place", "clamp"},
        "no rank holds the full parameters of this model",
    ),
    "weights written in forward": ({"backward", "look"}, "the forward of this module writes into its parameter"),
    "a foreign tensor in the optimizer": ({"step"}, "tensors in the optimizer are not what this wrapper steps"),
    "a parameter frozen while it had a gradient": (
        {"backward", "look", "clear", "finish", "clip", "step", "clip_and_step_if_finite"},
        "was frozen while it had a gradient",
    ),
    "unbucketed forms: more gradients after finish()": (
        {"backward", "finish"},
        "would be added to the sum of the last finish()",
    ),
    "unbucketed forms: p.grad written before finish()": ({"finish"}, "was written between backward() and finish()"),
}


def refusal(text):
    operation, _, error = text.partition(": ")
    found = [name for name, (at, sentence) in REFUSALS.items() if operation in at and sentence in error]
    assert found, f"no sentence of ours, or not here: {text}"
    return found[0]


# ---- the rows of the page -------------------------------------------------------------------------------------------


@pytest.mark.thorough("three ranks", keep=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("n", "op"), [(2, "mean"), (3, "sum")])
def test_habits_that_work_equal_one_process(n, op):
    cases = [(row.compared, kind, loop) for row in WORKS for kind in row.wrappers for loop in row.loops]

    def each(world, op):
        return [compared(world, kind, "AdamW", {"op": op}, loop) for compared, kind, loop in cases]

    for case, of_ranks in zip(cases, zip(*run(each, n, op, timeout_s=120), strict=True), strict=True):
        assert all(isinstance(one, float) and one <= EQUAL for one in of_ranks), (case, n, of_ranks)


@pytest.mark.thorough("three ranks", keep=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n", [2, 3])
def test_habits_that_are_refused_say_what_to_write(n):
    cases = [(row, kind) for row in REFUSED for kind in row.wrappers]

    def each(world):
        return [said(partial(row.trial, world, kind), (RuntimeError, ValueError, TypeError)) for row, kind in cases]

    for (row, kind), *texts in zip(cases, *run(each, n, timeout_s=120), strict=True):
        for text in texts:
            assert row.sentence in text and "\n" not in text, (row.habit, kind, text)


@pytest.mark.filterwarnings("ignore")
def test_habits_that_some_wrappers_refuse_raise_no_error_with_the_rest():
    refusing = {}
    for row in REFUSED:
        refusing.setdefault(row.habit, set()).update(row.wrappers)
    cases = [(row, kind) for row in REFUSED for kind in ALL if kind not in refusing[row.habit]]
    of_shards = ("float16 with a `GradScaler`", "load shards of a different number of ranks")  # not in BucketedDDP

    def each(world):
        for row, kind in cases:
            if row.habit not in of_shards:
                row.trial(world, kind)

    assert len(cases) > 10 and set(of_shards) <= refusing.keys()
    run(each, 2, timeout_s=120)


FROZEN = [((), ()), ((2,), ()), ((2,), (2,)), ((0, 1), ()), ((0, 1), (0,))]  # and which of them are trained again
SKIPS = {  # a sum, then a backward that is cleared before finish()
    (clear, frozen, again): [
        *[("backward", "sends"), ("finish",)],
        *(("freeze", i, True) for i in frozen),
        *[("backward", "sends"), ("clear", clear)],
        *(("freeze", i, False) for i in again),
        *[("backward", "sends"), ("finish",), ("step",)],
    ]
    for clear in CLEAR
    for frozen, again in FROZEN
}


@pytest.mark.filterwarnings("ignore")
def test_a_skip_before_finish_loses_nothing_of_what_is_frozen(say):
    """One process would go on to step a frozen parameter that has a gradient, also if it is zero."""
    kinds = [kind for kind in ALL if not kind.startswith("Naive")]

    def each(world):
        return [run_loop(world, kind, "momentum", {"bucket_bytes": 1} if kind != "FSDP" else {}, loop)
                for kind in kinds for loop in SKIPS.values()]  # fmt: skip

    ranks = run(each, 2, timeout_s=120)
    right = sum(not isinstance(found, str) for found in ranks[0])
    for (kind, skip), *found in zip(((kind, skip) for kind in kinds for skip in SKIPS), *ranks, strict=True):
        if isinstance(found[0], str):
            assert {refusal(text) for text in found} & {"a parameter frozen while it had a gradient"}, (
                kind,
                skip,
                found,
            )
        else:
            assert max(found) <= EQUAL, (kind, skip, found)
    assert right > len(ranks[0]) / 4


@pytest.mark.filterwarnings("ignore")
def test_random_loops_equal_one_process_or_are_refused(say):
    end_s, seed, tried, refused = time.monotonic() + WALK_S, SEED, 0, Counter()
    say(f"loops: seed {SEED}")
    while not tried or time.monotonic() < end_s:
        seeds = range(seed, seed + IN_A_RUN)
        n = 2 + seed % 2
        ranks = run(many, n, seeds, timeout_s=120)
        for number, of_ranks in zip(seeds, zip(*ranks, strict=True), strict=True):
            again = f"seed {number}, {n} ranks: {shown(number, n)}"
            first = of_ranks[0]
            if isinstance(first, str):
                kinds = {refusal(text) if isinstance(text, str) else text for text in of_ranks}
                assert len(kinds) == 1, f"ranks differ: {of_ranks}; {again}"
                refused[kinds.pop()] += 1
            else:
                assert max(of_ranks) <= EQUAL, f"{of_ranks}; {again}"
        tried += len(seeds)
        seed += len(seeds)
    shares = ", ".join(f"{name} {n}" for name, n in refused.most_common())
    say(f"loops: {tried} tried, {sum(refused.values())} refused: {shares}")
