"""*Will it fit?* in a browser: its formulas against `lib.planner`, its state in the address, its keyboard.

It needs no built book: the script and its numbers are put into a blank page.
"""

import math
import random
from dataclasses import replace

import pytest

from lib.cost.sizes import ModelShape, Recipe
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, memory_bytes, step_s
from lib.planner.presets import GPUS, PRESET_MODELS, STACKS, stack_for
from lib.planner.search import all_layouts
from tests.book_project import BOOK, load
from tools.browser import chromium, open_browser

pytestmark = [pytest.mark.browser, pytest.mark.skipif(chromium() is None, reason="no Chromium")]

extension = load("book_planner")
NUMBERS = extension.numbers()
ALL = Choices(context_parallel=True)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser):
    """A blank page with the formulas in it."""
    page = browser.new_page()
    page.add_script_tag(path=BOOK / "static" / "planner.js")
    return page


def some_model(rng: random.Random) -> ModelShape:
    """A preset, or any sizes; with a sequence of any length."""
    context = rng.choice((1024, 2048, 4096, 6000, 8192, 32_768, 131_072))
    if rng.random() < 0.5:
        return replace(rng.choice(list(PRESET_MODELS.values())), context=context)
    heads = rng.choice((8, 12, 16, 40, 64, 96))
    return ModelShape(
        heads * rng.choice((64, 80, 128)),
        rng.choice((6, 12, 24, 30, 32, 62, 105)),
        heads,
        rng.choice((32_000, 50_257, 128_256)),
        context,
        num_kv_heads=rng.choice([None, *(n for n in (1, 2, 4, 8) if heads % n == 0)]),
        d_mlp=rng.choice((None, 11_008, 14_336)),
        llama=rng.random() < 0.5,
        tied=rng.random() < 0.5,
    )


def some_training(rng: random.Random, gpus: int) -> Training:
    gpu = rng.choice(list(NUMBERS["gpus"]))
    stack = stack_for(rng.choice(list(STACKS)), gpu)
    if rng.random() < 0.2:
        stack = replace(stack, recipe=Recipe(4, 4, 0, 8), half_width=200.0, usable_share=0.9)
    cluster = Cluster(GPUS[gpu], gpus, rng.choice((4, 8, 8, 8, 72)))
    return Training(some_model(rng), cluster, stack, rng.choice((96, 512, 1000, 1024, 4096)))


def some_layout(rng: random.Random) -> Layout4D:
    tp = rng.choice((1, 2, 4, 8, 16))
    return Layout4D(
        tp,
        rng.choice((1, 1, 2, 4)),
        rng.choice((1, 2, 3, 4, 8, 16)),
        rng.choice((1, 2, 3, 8, 64)),
        rng.choice((1, 2, 4, 8)),
        rng.choice((1, 1, 2, 5, 7)),
        rng.choice((0, 1, 2, 3)),
        tp > 1 and rng.random() < 0.7,
        rng.choice(("none", "selective", "full")),
    )


def ask(page, what: str, trainings: list, *more) -> list:
    """What the script's planner says of each training, `what` being an expression of `of`, a planner, and `more`."""
    plain = [(extension.plain_training(one), *rest) for one, *rest in zip(trainings, *more, strict=True)]
    return page.evaluate(
        f"([all, limits]) => all.map(([training, given]) => {{ const of = planner(training, limits); return {what} }})",
        [plain, NUMBERS["limits"]],
    )


def differences(said: dict, kinds) -> list[float]:
    """Of each kind, as a fraction of the whole: a kind may be a small difference of two large numbers."""
    whole = sum(kinds)
    assert set(said) == set(kinds._fields)
    return [abs(said[name] - value) / whole for name, value in kinds._asdict().items()]


def test_seconds_and_bytes_of_a_thousand_random_layouts(page, say):
    rng = random.Random(0)
    layouts = [some_layout(rng) for _ in range(1000)]
    runs = [some_training(rng, layout.gpus) for layout in layouts]
    what = "{...of.planned(given), mfu: of.mfu(of.planned(given).stepS), room: of.room}"
    worst = 0.0
    for said, run, layout in zip(
        ask(page, what, runs, [one._asdict() for one in layouts]), runs, layouts, strict=True
    ):
        time, held = step_s(run, layout), memory_bytes(run, layout)
        found = differences(said["seconds"], time) + differences(said["memory"], held)
        found += [abs(said["stepS"] / time.total - 1), abs(said["bytes"] / held.total - 1)]
        found += [abs(said["mfu"] / run.utilisation(time.total) - 1)]
        assert max(found) < 1e-9, (run, layout)
        assert math.isclose(said["room"], run.cluster.device.memory_bytes * run.stack.usable_share)
        worst = max(worst, *found)
    say(f"will_it_fit.js and lib.planner differ by {worst:.1e} at most")


def page_training(rng: random.Random) -> Training:
    """One that can be chosen on the page, and some that cannot."""
    return some_training(rng, rng.choice((8, 16, 24, 64, 256, 1024)))


def test_it_refuses_what_the_search_leaves_out(page):
    rng = random.Random(1)
    for run in (page_training(rng) for _ in range(25)):
        possible = set(all_layouts(run, ALL))
        drawn = []
        for layout in [*rng.sample(sorted(possible), min(20, len(possible))), *(some_layout(rng) for _ in range(40))]:
            ranks = layout.tp * layout.cp * layout.pp
            sliced = layout._replace(dp=max(1, run.cluster.gpus // ranks), sequence_parallel=layout.tp > 1)
            if layout.zero != 2 and layout.recompute != "selective":
                drawn.append(sliced)
        said = ask(page, "of.refusal(given)", [run] * len(drawn), [one._asdict() for one in drawn])
        for layout, refusal in zip(drawn, said, strict=True):
            assert (refusal is None) == (layout in possible), (run, layout, refusal)
            assert refusal is None or ("choose" in refusal and refusal.endswith(".") and "undefined" not in refusal)


def test_the_best_three_are_those_of_the_search(page):
    rng = random.Random(2)
    runs = [page_training(rng) for _ in range(50)]
    for run, said in zip(runs, ask(page, "of.best()", runs), strict=True):
        try:
            best = best_layouts(run, ALL)
        except ValueError as error:
            assert said["found"] == []
            assert (said["smallest"] is None) == ("no layout cuts" in str(error))
            continue
        assert [one["layout"] for one in said["found"]] == [one.layout._asdict() for one in best]
        for theirs, ours in zip(said["found"], best, strict=True):
            assert math.isclose(theirs["stepS"], ours.seconds.total, rel_tol=1e-9)
            assert math.isclose(theirs["bytes"], ours.memory.total, rel_tol=1e-9)
