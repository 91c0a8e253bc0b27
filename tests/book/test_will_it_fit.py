"""*Will it fit?* in a browser: its formulas against `lib.planner`, its state in the address, its keyboard.

It needs no built book: the scripts and their numbers are put into a blank page.
"""

import json
import math
import random
from dataclasses import replace
from functools import partial

import pytest

from lib.cost.sizes import BIASES, PLANNED_RECOMPUTE, ModelShape, Recipe
from lib.layout import divisors
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, memory_bytes, step_s
from lib.planner.refusals import refusal
from lib.planner.search import ALL_OPEN, all_layouts, why_slower
from lib.planner.training import GPUS, PRESET_MODELS, STACKS, stack_for
from tests.book.book_project import BOOK, live_html, load

extension = load("book_planner")
NUMBERS = extension.numbers()
ALL = Choices(context_parallel=True)
EVERYTHING = replace(ALL_OPEN, zero=(0, 1, 2, 3), every=(1,), loss_chunks=(1,))
OPEN = "{zeroBubble: true, hybrid: true, ways: limits.recompute, everies: [1, 2], pieces: [1, 8]}"


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
        head_dim=rng.choice((None, None, 96, 256)),
        gated=rng.random() < 0.5,
        biases=rng.choice(BIASES),
        rms_norm=rng.random() < 0.5,
        rotary=rng.random() < 0.5,
        dropout_masks=rng.random() < 0.5,
        tied=rng.random() < 0.5,
    )


def some_training(rng: random.Random, gpus: int) -> Training:
    gpu = rng.choice(list(NUMBERS["gpus"]))
    stack = stack_for(rng.choice(list(STACKS)), gpu)
    if rng.random() < 0.2:
        stack = replace(stack, recipe=Recipe(4, 4, 0, 8), half_width=200.0, usable_share=0.9, fused_swiglu=False)
    cluster = Cluster(GPUS[gpu], gpus, rng.choice((4, 8, 8, 8, 72)))
    return Training(some_model(rng), cluster, stack, rng.choice((96, 512, 1000, 1024, 4096)))


def some_layout(rng: random.Random) -> Layout4D:
    tp, cp, dp = rng.choice((1, 2, 4, 8, 16)), rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 3, 8, 64))
    return Layout4D(
        tp,
        cp,
        rng.choice((1, 2, 3, 4, 8, 16)),
        dp,
        rng.choice((1, 2, 4, 8)),
        rng.choice((1, 1, 2, 5, 7, 16)),
        rng.choice((0, 1, 2, 3)),
        tp > 1 and rng.random() < 0.7,
        rng.choice(PLANNED_RECOMPUTE),
        rng.choice(("1f1b", "1f1b", "zb-h1", "zb-v")),
        rng.choice(divisors(dp * cp)),
        rng.choice((1, 2, 3)),
        rng.choice((1, 1, 8)),
    )


def ask(page, what: str, trainings: list, layouts: list | None = None) -> list:
    """What the script says of each training (and layout): `what` is an expression of `of`, its planner, and `layout`.

    As text, because playwright is slow at turning large objects into JavaScript.
    """
    plain = {
        "trainings": [extension.plain_training(one) for one in trainings],
        "layouts": [one._asdict() for one in layouts or []],
        "limits": NUMBERS["limits"],
    }
    script = f"""text => {{
        const {{ trainings, layouts, limits }} = JSON.parse(text);
        const say = (of, layout) => ({what});
        return JSON.stringify(trainings.map((training, i) => say(planner(training, limits), layouts[i])));
    }}"""
    return json.loads(page.evaluate(script, json.dumps(plain)))


def differences(said: dict, kinds) -> list[float]:
    """Of each kind, as a fraction of the whole: a kind may be a small difference of two large numbers."""
    whole = sum(kinds)
    assert set(said) == set(kinds._fields)
    return [abs(said[name] - value) / whole for name, value in kinds._asdict().items()]


def test_seconds_and_bytes_of_a_thousand_random_layouts(page, say):
    rng = random.Random(0)
    layouts = [some_layout(rng) for _ in range(1000)]
    runs = [some_training(rng, layout.gpus) for layout in layouts]
    what = "{...of.planned(layout), mfu: of.mfu(of.planned(layout).stepS), room: of.room}"
    worst = 0.0
    for said, run, layout in zip(ask(page, what, runs, layouts), runs, layouts, strict=True):
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
        possible = set(all_layouts(run, EVERYTHING))
        drawn = []
        for layout in [*rng.sample(sorted(possible), min(20, len(possible))), *(some_layout(rng) for _ in range(40))]:
            ranks = layout.tp * layout.cp * layout.pp
            dp = max(1, run.cluster.gpus // ranks)
            copies = layout.replicas if rng.random() < 0.5 else dp * layout.cp * layout.tp // run.cluster.per_node
            sliced = layout._replace(dp=dp, sequence_parallel=layout.tp > 1, replicas=max(1, copies))
            if layout.recompute != "selective":
                drawn.append(sliced._replace(every=1, loss_chunks=1))
        said = ask(page, "of.refusal(layout)", [run] * len(drawn), drawn)
        for layout, words in zip(drawn, said, strict=True):
            assert words == refusal(run, layout), (run, layout)
            assert (words is None) == (layout in possible), (run, layout, words)
            assert words is None or ("choose" in words and words.endswith(".") and "undefined" not in words)


def test_the_best_three_are_those_of_the_search(page):
    rng = random.Random(2)
    runs = [page_training(rng) for _ in range(28)]
    said_of = [*ask(page, f"of.best({OPEN})", runs[:4]), *ask(page, "of.best()", runs[4:])]
    for i, (run, said) in enumerate(zip(runs, said_of, strict=True)):
        try:
            best = best_layouts(run, ALL_OPEN if i < 4 else ALL)
        except ValueError as error:
            assert said["found"] == []
            smallest = said["smallest"]
            words = (
                [f"needs {smallest['bytes'] / 1e9:.1f} GB on a GPU"]
                if smallest
                else ["the batch is", "no layout cuts"]
            )
            assert any(word in str(error) for word in words)
            continue
        assert [one["layout"] for one in said["found"]] == [one.layout._asdict() for one in best]
        for theirs, ours in zip(said["found"], best, strict=True):
            assert math.isclose(theirs["stepS"], ours.seconds.total, rel_tol=1e-9)
            assert math.isclose(theirs["bytes"], ours.memory.total, rel_tol=1e-9)


def test_why_the_next_one_is_slower(page):
    run = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 1024)
    best = best_layouts(run, ALL)
    said = ask(
        page, "of.whySlower(of.best().found[0], of.planned(layout))", [run] * 2, [one.layout for one in best[1:]]
    )
    for theirs, ours in zip(said, best[1:], strict=True):
        words = f"{theirs['fraction']:.1%} slower: {theirs['extraS']:.3g} s more for {theirs['kind']}"
        assert words == why_slower(best[0], ours)


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture
def page_at(opened):
    """The page with its controls, at an address."""
    return partial(opened, f'<!doctype html><meta charset="utf-8"><title>page</title>{live_html(extension)}')


def verdict(page) -> str:
    return page.inner_text(".verdict")


def test_what_it_says_is_what_python_says(page_at):
    run = Training(PRESET_MODELS["llama-13b"], Cluster(GPUS["a100"], 16), stack_for("llama3", "a100"), 256)
    layout = Layout4D(2, 1, 2, 4, 1, 2, 1, True)
    page = page_at("#model=llama-13b&gpu=a100&gpus=16&seq=4096&batch=256&stack=llama3&tp=2&cp=1&pp=2&v=2&b=1&zero=1")
    held, time = memory_bytes(run, layout), step_s(run, layout)
    assert f"Peak memory is {held.total / 1e9:.1f} GB per GPU" in verdict(page)
    assert f"{time.total:#.3g} s at {100 * run.utilisation(time.total):.1f}% MFU" in verdict(page)
    listed = page.inner_text("figure >> nth=0 >> ul")
    assert f"activations {held.activations / 1e9:.1f} GB" in listed
    assert {kind: kind in listed for kind in held._fields} == {kind: n > 0 for kind, n in held._asdict().items()}
    first = best_layouts(run, ALL)[0]
    assert f"tp {first.layout.tp} · " in page.inner_text(".best button >> nth=0")
    assert f"{first.memory.total / 1e9:.1f} GB" in page.inner_text(".best button >> nth=0")


def test_the_address_keeps_what_was_chosen(page_at):
    page = page_at()
    assert "It does not fit." in verdict(page) and "#" not in page.url
    page.focus("input[name=pp]:checked")
    page.keyboard.press("ArrowRight")
    assert "It fits." in verdict(page) and "pp=2" in page.url
    assert page.get_attribute(".verdict", "aria-live") == "polite"
    page.select_option("select[name=gpus]", "128")
    said, address = verdict(page), page.url
    page.reload()
    assert (verdict(page), page.url) == (said, address)
    page.keyboard.press("Tab")
    page.focus(".best button >> nth=1")
    page.keyboard.press("Enter")
    assert "It fits." in verdict(page) and "gpus=128" in page.url
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true", "the focus stays there"


def test_the_impossible_is_marked_and_explained(page_at):
    page = page_at("#tp=8&pp=2&gpus=64")
    assert page.get_attribute("input[name=zero][value='3']", "title").startswith("ZeRO-3")
    assert page.get_attribute("input[name=zero][value='0']", "title") == ""
    page.check("input[name=zero][value='3']")
    assert verdict(page).startswith("Impossible. ZeRO-3") and not page.is_visible("figure >> nth=0")
    page.locator(".best button >> nth=0").click()
    assert verdict(page).startswith("It fits.") and page.is_visible("figure >> nth=0")


def test_another_schedule_is_searched_where_it_is_chosen(page_at):
    page = page_at("#model=llama-70b&gpus=64&batch=64&tp=8&pp=4")
    assert "ZB" not in page.inner_text(".best")
    page.check("input[name=schedule][value='zb-v']")
    assert "choose v 2" in verdict(page) and "ZB-" in page.inner_text(".best")
    page.check("input[name=v][value='2']")
    assert verdict(page).startswith("It fits.") and "schedule=zb-v" in page.url


def test_a_misspelt_address_changes_nothing(page_at):
    said = verdict(page_at())
    assert verdict(page_at("#tp=3&model=<b>&__proto__=1&zero=&nothing")) == said


def test_where_nothing_fits_the_smallest_is_offered(page_at):
    page = page_at("#model=llama-405b&gpus=8")
    assert "No layout fits." in page.inner_text(".best") and page.locator(".best button").count() == 1
    page.locator(".best button").click()
    assert "It does not fit." in verdict(page)
    assert "No layout divides" in page_at("#gpus=16384&batch=8&model=llama-7b").inner_text(".best")
