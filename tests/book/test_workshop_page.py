"""*Try a schedule* in a browser: its rules against `lib.pipeline`, and what a reader does with mouse and keyboard.

It needs no built book: the scripts and their words are put into a blank page.
"""

import gzip
import json
import math
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from course.workshop.typed import WHY, Par, Verdict, workshop
from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import Op, Schedule, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from lib.pipeline.simulate import Costs
from tests.book.book_project import BOOK, live_html, load, violations


@pytest.fixture(scope="module")
def extension():
    """Its import judges schedules."""
    return load("book_workshop")


@pytest.fixture(scope="module")
def words(extension):
    return extension.sentences()


@pytest.fixture(scope="module")
def page(browser):
    """A blank page with the rules in it."""
    page = browser.new_page()
    page.add_script_tag(path=BOOK / "static" / "schedule.js")
    return page


# ---- the rules ------------------------------------------------------------------------------------------------------


def interleaved_in_two(n: int, m: int) -> Schedule:
    return interleaved(n, n * -(-m // n), 2)


def in_halves(n: int, m: int) -> Schedule:
    """1F1B with each B as I and, at once, W."""
    rows = [
        [half for a in row for half in ([a._replace(op=Op.I), a._replace(op=Op.W)] if a.op == Op.B else [a])]
        for row in one_f_one_b(n, m).actions
    ]
    return replace(one_f_one_b(n, m), actions=tuple(map(tuple, rows)))


MAKERS = [naive, gpipe, one_f_one_b, in_halves, zb_h1, zb_h2, zb_v, interleaved_in_two]


def swapped(rng: random.Random, schedule: Schedule) -> Schedule:
    """Two actions of a rank that follow each other, in the other order; the schedule itself if that is wrong."""
    rows = [list(row) for row in schedule.actions]
    row = rng.choice(rows)
    i = rng.randrange(len(row) - 1)
    row[i : i + 2] = row[i + 1], row[i]
    try:
        return prove(replace(schedule, actions=tuple(map(tuple, rows))))
    except ScheduleError:
        return schedule


def some_right(rng: random.Random) -> Schedule:
    schedule = rng.choice(MAKERS)(rng.randint(1, 5), rng.randint(1, 6))
    for _ in range(rng.choice((0, 5, 40))):
        schedule = swapped(rng, schedule)
    return schedule


BAD_WORDS = ("0F", "F0", "0f0", "1X2", "0F0B0", "-1F0", "it's", '"it\'s"', "a\\b", "<b>", "0F0;", "7F0", "0F99")
BAD_WORDS += ("9" * 5000 + "F0",)
MISTAKES = (
    "remove",
    "double",
    "swap",
    "to another rank",
    "bad word",
    "rename",
    "half",
    "rank",
    "cut",
    "only some ops",
)
MISTAKES += ("other microbatches", "last stage first", "last stage first", "another's stage")


def mutate(rng: random.Random, rows: list[list[str]]) -> None:
    """One mistake, or what only looks like one."""
    full = [row for row in rows if row]
    row = rng.choice(full or rows)
    place = rng.randrange(len(row) or 1)
    kind = rng.choice(MISTAKES)
    if kind == "remove":
        del row[place : place + 1]
    elif kind == "double" and row:
        row.insert(rng.randrange(len(row)), row[place])
    elif kind == "swap" and row:
        other = rng.randrange(len(row))
        row[place], row[other] = row[other], row[place]
    elif kind == "to another rank" and row:
        rng.choice(rows).insert(0, row.pop(place))
    elif kind == "bad word":
        row.insert(place, rng.choice(BAD_WORDS))
    elif kind == "rename" and row:
        row[place] = f"{rng.randrange(5)}{rng.choice('FBIW')}{rng.randrange(6)}"
    elif kind == "half" and row:
        row[place] = row[place].replace("B", rng.choice("IW")).replace("I", "B")
    elif kind == "rank":
        row.insert(0, f"rank {rng.randrange(5)}:")
    elif kind == "cut" and len(rows) > 1:
        rows.remove(row)
    elif kind == "only some ops":
        letters = rng.choice(("BIW", "F", "FBIW"))
        rows[:] = [[word for word in row if not set(word) & set(letters)] for row in rows]
    elif kind == "other microbatches":  # right on each rank, and often a circle of ranks
        numbers = sorted({word[2:] for word in row})
        renamed = dict(zip(numbers, rng.sample(numbers, len(numbers)), strict=True))
        row[:] = [word[:2] + renamed[word[2:]] for word in row]
    elif kind == "last stage first":  # where a rank has several
        row.sort(key=lambda word: word[:1], reverse=True)
    elif kind == "another's stage" and len(rows) > 1:  # a rank has two stages, and one has none
        rows[0] += rows.pop()
        rows.append([])


def some_text(rng: random.Random, is_right: bool) -> tuple[str, Par]:
    """A text as somebody types it, and what it is compared with: mostly a par of its sizes."""
    schedule = some_right(rng)
    rows = [list(map(str, row)) for row in schedule.actions]
    for _ in range(0 if is_right else rng.choice((1, 1, 1, 2, 3))):
        mutate(rng, rows)
    blank = rng.choice((" ", " ", ", ", "\t", "  "))
    lines = [f"{rng.choice(('', f'rank {r}: ', f'  rank  {r} :'))}{blank.join(row)}" for r, row in enumerate(rows)]
    text = rng.choice(("\n", "\n", "\r\n", "\n\n", "  # 9X9\n\n# 0F0\n")).join(lines) + rng.choice(
        ("", "\n", " # end")
    )
    n, m = schedule.num_ranks, schedule.num_microbatches
    if not is_right and rng.random() < 0.05:
        n, m = rng.randint(1, 5), rng.randint(1, 6)
    costs = Costs() if rng.random() < 0.5 else Costs(*(rng.choice((0.5, 1, 1.3, 2, 3)) for _ in "FIW"))
    return text, Par(n, m, rng.choice((None, None, 1, 3, 8)), costs)


def plain_par(par: Par) -> dict:
    costs = {"F": par.costs.F, "I": par.costs.I, "W": par.costs.W}
    return {"numRanks": par.num_ranks, "numMicrobatches": par.num_microbatches, "limit": par.limit, "costs": costs}


def ask(page, words: dict, what: str, asked: list) -> list:
    """What the script says of each: `what` is an expression of `of`, its rules, and of `text` and `par`."""
    script = f"""text => {{
        const {{ asked, words }} = JSON.parse(text), of = scheduler(words);
        const say = (text, par) => ({what});
        return JSON.stringify(asked.map(([text, par]) => say(text, of.makePar(par))));
    }}"""
    plain = [(text, plain_par(par)) for text, par in asked]
    return json.loads(page.evaluate(script, json.dumps({"asked": plain, "words": words})))


SAYS = """(({ headline, error, timeline, score, advice }) => ({
    headline, advice, kind: error?.kind, problem: error?.message,
    actions: error?.actions.map(({ name }) => name), waits: error && [...error.waits.keys()],
    makespan: timeline?.makespan, score, words: score && of.words(score),
    slots: timeline?.slots.map(({ rank, action, start, end }) => [rank, action.name, start, end]),
}))(of.workshop(text, par))"""
ALL_OPS, OPS = ", ".join(Op), "F, B, I, W"  # messages and sums are no actions on the page


def problem_of(verdict: Verdict) -> str:
    """Without the name and the grid, which the page draws."""
    lines = verdict.problem.removeprefix("yours: ").replace(ALL_OPS, OPS).splitlines()
    grid = next((i for i, line in enumerate(lines) if line.startswith("  rank 0  ")), len(lines))
    return "\n".join(lines[:grid])


def same_words(template: str, sentence: str) -> bool:
    return bool(re.fullmatch(re.sub(r"\\{\d\\}", ".+", re.escape(template)), sentence))


@pytest.mark.thorough("in Python and in the browser")
def test_a_thousand_random_schedules(page, extension, words, say):
    rng = random.Random(0)
    asked = [some_text(rng, is_right=i % 5 < 2) for i in range(999)]
    asked.append((extension.LATE_FIRST, Par(2, 5, 5)))  # which chance finds too seldom
    kinds, advice = Counter(), Counter()
    for said, (text, par) in zip(ask(page, words, SAYS, asked), asked, strict=True):
        ours = workshop(text, par)
        assert (said["headline"], said["advice"]) == (ours.headline(), ours.advice), text
        if ours.error:
            assert (said["kind"], said["problem"]) == (ours.error.kind.name, problem_of(ours)), text
            assert said["actions"] == [str(action) for action in ours.error.actions], text
            assert said["waits"] == list(ours.error.waits), text
            kinds[said["kind"]] += 1
            continue
        score, timeline = ours.score, ours.timeline
        slots = [[slot.rank, str(slot.action), slot.start, slot.end] for slot in timeline.slots]
        assert said["slots"] == slots, text
        assert said["makespan"] == said["score"]["time"] == timeline.makespan
        assert math.isclose(said["score"]["bubble"], score.bubble, rel_tol=1e-12, abs_tol=1e-12)
        assert said["score"]["kept"] == list(score.kept) and said["score"]["inLimit"] == score.in_limit
        assert said["words"] == list(score.words()[:4])
        kinds["right"] += 1
        advice[next(name for name, said in words["advice"].items() if same_words(said, ours.advice))] += 1
    say(f"schedule.js and lib.pipeline agree on {kinds.total()} schedules: {dict(kinds.most_common())}")
    assert kinds["right"] >= 400 and set(kinds) == {"right", *(fault.name for fault in WHY)}
    assert min(kinds.values()) >= 5, kinds
    assert set(advice) == set(words["advice"]), advice


def test_par_and_its_scores(page, words):
    costs = Costs(), Costs(2, 3, 2), Costs(1, 1, 3), Costs(3, 0.5, 1.3)
    pars = [Par(n, m, limit, cost) for n in (1, 2, 4, 8) for m in (1, 3, 8) for limit in (None, 2) for cost in costs]
    what = "({ scores: par.scores.map(of.words), time: par.time, most: par.most, least: [1, 2, 3].map(par.least) })"
    for said, par in zip(ask(page, words, what, [("", par) for par in pars]), pars, strict=True):
        assert said["scores"] == [list(score.words()[:4]) for score in par.scores()], par
        assert (said["time"], said["most"]) == (par.time, par.most)
        assert said["least"] == [par.least(1), par.least(2), par.least(3)]


def test_numbers_are_written_as_python_writes_them(page, words):
    rng = random.Random(3)
    numbers = [0, 1, 2.5, 1 / 3, 0.1 + 0.2, 1e-5, 123456.7, 1234567, 1e20, 0.0001, 19.499999999999996, 999999.5]
    numbers += [rng.uniform(0, 10 ** rng.randint(-6, 8)) for _ in range(300)]
    shares = [k / 32 for k in range(33)] + [rng.random() for _ in range(300)]
    script = "([words, x, y]) => [x.map(scheduler(words).g), y.map(scheduler(words).percent)]"
    said = page.evaluate(script, [words, numbers, shares])
    assert said == [[f"{x:g}" for x in numbers], [f"{x:.1%}" for x in shares]]


def test_each_maker_is_pythons(page, words):
    makers = {"naive": naive, "gpipe": gpipe, "oneFOneB": one_f_one_b, "zbH1": zb_h1, "zbH2": zb_h2}
    script = "([words, name, n, m]) => (({ toText, makers }) => toText(makers[name](n, m, 2)))(scheduler(words))"
    for n, m in ((1, 1), (2, 1), (3, 5), (4, 8), (8, 3)):
        for name, make in makers.items():
            assert page.evaluate(script, [words, name, n, m]) == make(n, m).to_text().strip()
    for n, m in ((2, 2), (4, 8)):
        assert page.evaluate(script, [words, "interleaved", n, m]) == interleaved(n, m, 2).to_text().strip()


def test_a_sentence_that_python_says_otherwise_by_now_stops_the_build(extension):
    assert extension.with_holes("1F0 waits from 1 to 1.5.", "1F0", "1", "1.5") == "{0} waits from {1} to {2}."
    with pytest.raises(ValueError, match="does not say 2F0"):
        extension.with_holes("1F0 waits.", "2F0")


def test_all_own_scripts_are_light(say):
    scripts = [*BOOK.glob("static/*.js"), *BOOK.parent.glob("book/figures/*.js")]
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9, mtime=0)) for path in scripts}
    say(f"own scripts, compressed: {sum(sizes.values()):,} bytes {sizes}")
    # Those of Will it fit? are loaded on its page only: its formulas, its fields, models with experts, and its reader
    # of configs, which knows some fifty architectures. 46,500 is chosen, on 45,562 of today.
    planner = sum(sizes.pop(name) for name in load("book_planner").SCRIPTS)
    # 32,500 is chosen, on 31,876 of today: folds, sidebar and search took 4,400 in November 2026.
    assert len(sizes) >= 6 and sum(sizes.values()) < 32_500 and planner < 46_500


# ---- the page -------------------------------------------------------------------------------------------------------

STYLE = (BOOK / "static" / "book.css").read_text(encoding="utf-8")
# What is copied is kept where a test can read it.
CLIPBOARD = """Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => {
    if (window.refuses) throw new Error("no");
    window.copied = text;
} } });"""


@pytest.fixture
def page_at(opened, extension):
    """The page with its controls, at an address."""

    def open_at(address: str = "", width: int = 1280, mode: str = "light", **options):
        html = f"""<!doctype html><html lang="en" data-theme="{mode}"><meta charset="utf-8"><title>page</title>
            <meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}
            * {{ box-sizing: border-box }} body {{ margin: 0; background: var(--paper); color: var(--pbh-text) }}
            article {{ max-width: 756px; margin: 0 auto; padding: 0 18px }}</style>
            <main><article class="bd-article"><h1>Page</h1>{live_html(extension)}</article></main></html>"""
        return opened(html, address, width, CLIPBOARD, **options)

    return open_at


def headline(page) -> str:
    return page.inner_text(".verdict")


def rows(page) -> list[str]:
    """Each rank's words, as the text has them."""
    return [line.partition(": ")[2] for line in page.input_value("textarea").splitlines()]


def block(page, name: str):
    return page.locator(".block", has=page.locator("title", has_text=re.compile(f"^{name}:")))


def focused(page) -> str:
    title = "document.activeElement.querySelector(':scope > title')?.textContent ?? ''"
    return page.evaluate(title).partition(":")[0]


def middle(page, name: str) -> tuple[float, float]:
    box = block(page, name).locator("rect").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def drag(page, name: str, to: str, beyond: float = 0, drop: bool = True) -> None:
    """Takes a block at its middle, and lets it go on the middle of another."""
    (x, y), (far, _) = middle(page, name), middle(page, to)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move((x + far) / 2, y)
    page.mouse.move(far + beyond, y + 5)
    if drop:
        page.mouse.up()


def times(page) -> set[str]:
    """When each action runs, as the grid says it."""
    return set(page.locator(".block title").evaluate_all("all => all.map(one => one.textContent)"))


def times_of(schedule: Schedule, par: Par) -> set[str]:
    return {f"{slot.action}: {slot.start:g} to {slot.end:g}" for slot in par.play(schedule).slots}


def shown_advice(page) -> str:
    return " ".join(page.inner_text(".advice").split())


def test_it_opens_with_the_circle_of_the_notebook(page_at):
    page = page_at()
    typed = page.input_value("textarea")
    assert typed in (BOOK.parent / "chapters" / "workshop.md").read_text(encoding="utf-8")
    verdict = workshop(typed, Par(4, 6))
    assert headline(page) == verdict.headline() == "This cannot work." and "#" not in page.url
    assert "Ranks wait for each other: rank 0 at 0B0 waits for 1B0, which rank 1 does later" in shown_advice(page)
    assert shown_advice(page).endswith(verdict.advice)
    wrong = page.locator(".block.wrong").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert wrong == [f"{name}, it never runs, wrong" for name in ("B0, stage 0, rank 0", "F1, stage 1, rank 1")]
    red = block(page, "0B0").locator("rect").evaluate("rect => getComputedStyle(rect).fill")
    assert red == "rgb(179, 38, 30)" and page.locator(".block.awaited").count() == 2
    ran = {when.partition(":")[0] for when in times(page) if " to " in when}
    assert ran == {"0F0", "1F0", "2F0", "3F0", "3B0"}, "after five blocks"


@pytest.mark.parametrize("make", [naive, gpipe, one_f_one_b, zb_h1, zb_v, lambda n, m: interleaved(n, m, 2)])
def test_what_is_typed_is_drawn_and_scored(page_at, make):
    page, schedule, par = page_at("#ranks=3&microbatches=6&F=2&I=1.5"), make(3, 6), Par(3, 6, costs=Costs(2, 1.5, 1))
    page.fill("textarea", schedule.to_text())
    verdict = workshop(schedule.to_text(), par)
    assert headline(page) == verdict.headline() and shown_advice(page) == verdict.advice
    assert times(page) == times_of(schedule, par)
    last = par.play(schedule).slots[-1]
    last_x = float(re.search(r"[\d.]+", block(page, str(last.action)).get_attribute("style"))[0])
    for slot in par.play(schedule).slots:  # as far to the right as it is late
        style = block(page, str(slot.action)).get_attribute("style")
        x, y = map(float, re.search(r"translate\(([\d.]+)px, ([\d.]+)px\)", style).groups())
        assert math.isclose(x * last.start, last_x * slot.start, rel_tol=1e-3) and y == 24 + 37 * slot.rank
    first = {schedule.rank_of.index(rank) for rank in range(3)}
    others = [slot for slot in par.play(schedule).slots if slot.action.stage not in first]
    assert page.locator(".block path[d^=M]").count() == len(others), "underlined"
    kept = page.locator("ol.ranks li").evaluate_all("all => all.map(one => one.querySelector('small').innerText)")
    assert kept == [f"keeps {count:g}" for count in verdict.score.kept]
    table = page.locator("tbody tr").evaluate_all("all => all.map(row => [...row.cells].map(cell => cell.innerText))")
    assert table == [list(score.words()) for score in verdict.rows()]
    assert page.inner_text("tr.yours td >> nth=0") == "yours"


def test_a_block_is_dragged_along_its_rank(page_at):
    page = page_at("#schedule=1f1b")
    drag(page, "3B2", "3B0", drop=False)
    page.keyboard.press("Escape")
    page.mouse.up()
    assert rows(page)[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5", "Escape puts it back"
    drag(page, "3B1", "3F2", beyond=3)
    assert rows(page)[3] == "3F0 3B0 3F1 3F2 3B1 3B2 3F3 3B3 3F4 3B4 3F5 3B5"
    assert headline(page).startswith("It works, in ") and "text=rank" in page.url and focused(page) == "3B1"
    assert page.locator("input:checked").count() == 0, "it is no preset any more"
    drag(page, "3B1", "3B0")
    assert rows(page)[3] == "3F0 3B1 3B0 3F1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5"
    assert headline(page) == "This cannot work." and "3B1 comes before 3F1." in shown_advice(page)
    assert workshop(page.input_value("textarea"), Par(4, 6)).problem.startswith("yours: 3B1 comes before 3F1")
    drag(page, "0F1", "0F1", beyond=2)
    assert rows(page)[0].startswith("0F0 0F1 0F2"), "a press is no move"
    page.click("button[name=undo]")
    page.click("button[name=undo]")
    assert rows(page)[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5" and page.is_disabled(
        "button[name=undo]"
    )
    assert page.is_checked("input[value='1f1b']") and "text=" not in page.url


def test_the_first_game_takes_five_moves(page_at):
    page = page_at()
    for name, to in (("0F1", "0B0"), ("0F2", "0B0"), ("0F3", "0B1"), ("0F4", "0B2"), ("0F5", "0B3")):
        assert headline(page) == "This cannot work."
        drag(page, name, to)
    assert headline(page).startswith("It works, in ")


def test_a_finger_drags_a_block_and_the_page(page_at):
    page = page_at("#schedule=1f1b", width=390, has_touch=True, is_mobile=True)
    finger = page.context.new_cdp_session(page)

    def slide(x, y, dx, dy):
        for kind, share in (("Start", 0), ("Move", 0.2), ("Move", 0.6), ("Move", 1), ("End", 1)):
            points = [] if kind == "End" else [{"x": x + share * dx, "y": y + share * dy}]
            finger.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    page.locator(".grid").scroll_into_view_if_needed()
    slide(*middle(page, "0F1"), 40, 0)
    assert rows(page)[0].startswith("0F0 0F2 0F1") or rows(page)[0].startswith("0F0 0F2 0F3 0F1")
    before, at = rows(page), page.evaluate("scrollY")
    slide(*middle(page, "0F2"), 30, -80)
    page.wait_for_function(f"scrollY !== {at}")
    assert rows(page) == before, "a finger that goes up scrolls"
    assert page.locator(".block.selected title").text_content().startswith("0F1:"), "and selects nothing"
    page.wait_for_function("() => window.wasAt === (window.wasAt = scrollY)", polling=100)  # it has come to rest
    block(page, "1F0").locator("text").tap()
    assert page.locator(".block.selected title").text_content().startswith("1F0:")


def test_the_keyboard_does_what_the_mouse_does(page_at):
    page = page_at("#schedule=1f1b")
    page.focus("select[name=W]")
    page.keyboard.press("Tab")
    assert focused(page) == "0F0", "one stop for all blocks"
    keys = [("Shift+ArrowRight", "0F1"), ("End", "0B5"), ("ArrowDown", "1B5"), ("ArrowUp", "0B4"), ("Home", "0F0")]
    for key, name in keys:
        page.keyboard.press(key)
        assert focused(page) == name and "#" in page.url, key
    page.keyboard.press("ArrowRight")
    assert rows(page)[0].startswith("0F1 0F0 0F2") and focused(page) == "0F0"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert rows(page)[0].startswith("0F0 0F1 0F2") and focused(page) == "0F0", "the first place is the first"
    page.keyboard.press("Delete")
    assert rows(page)[0].startswith("0F1 0F2") and focused(page) == "0F1"
    assert "0F0 is missing." in shown_advice(page) and page.locator("text.missing").text_content() == "F0"
    page.keyboard.press("Control+z")
    assert rows(page)[0].startswith("0F0 0F1 0F2") and headline(page).startswith("It works")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.tools') !== null"), "and out again"


def test_buttons_add_what_is_missing(page_at):
    page = page_at("#ranks=2&microbatches=2")
    page.fill("textarea", "")
    assert "there is no action in it" in shown_advice(page).lower()
    names = ["addF", "addF", "addB", "addI", "addW"]
    for name in names:
        page.click(f"button[name={name}]")
    assert page.input_value("textarea") == "rank 0: 0F0 0F1 0B0 0I1 0W1"
    assert page.inner_text("button[name=addF]") == "+ 1F0", "the next rank"
    for name in names:
        page.click(f"button[name={name}]")
    assert rows(page)[1] == "1F0 1F1 1B0 1I1 1W1" and headline(page).startswith("It works, in ")
    assert [page.is_disabled(f"button[name=add{op}]") for op in "FBIW"] == [True] * 4
    page.click("button[name=split]")
    assert rows(page) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1W0 1I1 1W1"]
    block(page, "0W0").click()
    page.click("button[name=right]")
    assert rows(page)[0] == "0F0 0F1 0I0 0I1 0W0 0W1"
    page.click("button[name=left]")
    page.click("button[name=remove]")
    assert rows(page)[0] == "0F0 0F1 0I0 0I1 0W1" and page.inner_text("button[name=addW]") == "+ 0W0"


def test_comments_and_the_form_of_other_lines_stay(page_at):
    page = page_at("#ranks=2&microbatches=1")
    page.fill("textarea", "# two ranks\n0F0,0B0 # first\n\n rank 1 : 1F0   1B0")
    block(page, "0F0").click()
    page.keyboard.press("ArrowRight")
    assert page.input_value("textarea") == "# two ranks\n0B0 0F0 # first\n\n rank 1 : 1F0   1B0"
    page.keyboard.press("Delete")
    page.keyboard.press("Delete")
    assert page.input_value("textarea") == "# two ranks\nrank 0: # first\n\n rank 1 : 1F0   1B0", (
        "it is still its line"
    )


def test_the_address_keeps_all_of_it(page_at):
    page = page_at("#schedule=gpipe&ranks=3&microbatches=4&limit=2&W=2")
    par = Par(3, 4, 2, Costs(1, 1, 2))
    assert headline(page) == workshop(gpipe(3, 4).to_text(), par).headline()
    page.select_option("select[name=ranks]", "2")
    assert rows(page)[0] == " ".join(map(str, gpipe(2, 4).actions[0])), "a preset follows the sizes"
    assert "text=" not in page.url and "ranks=2" in page.url
    page.click("button[name=undo]")
    assert "ranks=3" in page.url and len(rows(page)) == 3, "sizes come back with their text"
    page.select_option("select[name=ranks]", "2")
    page.fill("textarea", "# mine & yours\n0F0 0B0\n1F0 1B0")
    assert "this is for 2 ranks and 1 microbatches" in shown_advice(page).lower()
    page.select_option("select[name=microbatches]", "1")
    said = page.inner_text("#workshop")
    assert headline(page).startswith("It works")
    other = page_at(page.url.partition("html")[2])
    assert other.inner_text("#workshop") == said and other.input_value("textarea").startswith("# mine & yours\n0F0")
    page.click("button[name=link]")
    assert page.evaluate("copied") == page.url and page.inner_text("button[name=link]") == "Copied"
    page.evaluate("window.refuses = true")
    page.click("button[name=python]")
    page.wait_for_function("document.querySelector('button[name=python]').innerText.includes('does not let')")


def test_a_misspelt_address_changes_nothing(page_at):
    said = page_at().inner_text("#workshop")
    assert page_at("#ranks=99&schedule=<b>&__proto__=1&F=&nothing").inner_text("#workshop") == said


def test_a_link_to_a_section_leaves_the_schedule_as_it_is(page_at):
    page = page_at("#schedule=1f1b")
    drag(page, "3B1", "3F2", beyond=3)
    said, address = page.inner_text("#workshop"), page.url
    assert headline(page).startswith("It works, in ")
    for section in ("three-games", ""):
        page.evaluate("to => new Promise((done) => { onhashchange = done; location.hash = to; })", section)
        assert page.inner_text("#workshop") == said and page.url.endswith(f"#{section}")
    page.evaluate("to => new Promise((done) => { onhashchange = done; location.hash = to; })", "schedule=gpipe")
    assert page.is_checked("input[value='gpipe']"), "a schedule in the address is shown"
    page.evaluate("to => new Promise((done) => { onhashchange = done; location.replace(to); })", address)
    assert page.inner_text("#workshop") == said


@pytest.mark.parametrize("address", ["#schedule=zb-h1", "#ranks=2&microbatches=3&schedule=1f1b&limit=1&I=2.5"])
def test_what_is_copied_as_python_says_the_same(page_at, address):
    page = page_at(address)
    if "limit" in address:
        first, rest = page.input_value("textarea").split("\n", 1)
        page.fill("textarea", f'{first} # """ \\\n{rest}')
    page.click("button[name=python]")
    names = {"workshop": workshop, "Par": Par}
    exec(page.evaluate("copied"), names)
    assert headline(page) == names["verdict"].headline() and shown_advice(page) == names["verdict"].advice
    assert times(page) == times_of(names["verdict"].schedule, names["verdict"].par)


def test_a_mistake_is_in_view_where_the_grid_is_wider_than_the_screen(page_at):
    page = page_at("#schedule=1f1b&microbatches=16", width=390)
    page.locator("textarea").scroll_into_view_if_needed()
    at = page.evaluate("scrollY")
    page.fill("textarea", one_f_one_b(4, 16).to_text().replace("2B15", "2I15"))
    assert page.evaluate("document.querySelector('.time').scrollLeft") > 0 and page.evaluate("scrollY") == at
    red, screen = page.locator(".block.wrong").bounding_box(), page.locator(".time").bounding_box()
    assert screen["x"] <= red["x"] <= screen["x"] + screen["width"] - red["width"]


@pytest.mark.parametrize("has_touch", [False, True])
def test_what_the_page_opens_with_fits_a_phone(page_at, has_touch):
    """A finger needs wider blocks, and a longer schedule than 21 units then scrolls."""
    page = page_at("", width=390, has_touch=has_touch, is_mobile=has_touch)
    for preset in ("one", "zb-h1") if has_touch else ("one", "zb-h1", "1f1b", "gpipe"):
        page.evaluate(f"location.hash = 'schedule={preset}'")
        page.wait_for_function(f"document.querySelector(\"input[value='{preset}']\").checked")
        assert page.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('.time'))") <= 0, preset
        names = page.locator(".ranks span").evaluate_all("all => all.map((e) => e.getBoundingClientRect().bottom)")
        rows = page.locator(".idle[height]").evaluate_all("all => all.map((e) => e.getBoundingClientRect().y)")
        assert all(-1 <= row - name < 6 for name, row in zip(names, rows, strict=True)), "each above its row"


def test_whatever_is_typed_is_drawn_and_is_no_html(page_at):
    page, rng = page_at(), random.Random(4)
    for _ in range(40):
        text, par = some_text(rng, is_right=False)
        page.fill("textarea", text)
        lines = re.sub(r"(?m)^\s*rank\s+\d+\s*:|#.*$", "", text.replace("\r", "\n"))
        words = lines.replace(",", " ").split()
        assert page.locator(".block").count() == len(words), text
        assert headline(page) == workshop(text, Par(4, 6)).headline()
    page.fill("textarea", "<img src=x onerror=alert(1)>")
    assert "'<img' is not an action" in shown_advice(page) and page.locator("#workshop img").count() == 0
    assert page.locator(".block.wrong").count() == 3


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_everybody_can_read_it(page_at, width, mode):
    page = page_at("", width, mode)
    for text in (None, zb_v(4, 6).to_text(), "0F0 0X0", one_f_one_b(4, 6).to_text().replace(" 2B3", "")):
        if text:
            page.fill("textarea", text)
            page.locator(".block").first.click()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the grid scrolls in its own box"
        small = page.evaluate(
            """[...document.querySelectorAll("#workshop *")].filter((e) => e.textContent.trim() && !e.children.length
                && e.checkVisibility() && e.nodeName !== "title" && parseFloat(getComputedStyle(e).fontSize) < 12)
                .map((e) => e.outerHTML.slice(0, 100))"""
        )
        assert small == []
        narrow = page.locator(".block").evaluate_all(
            """all => all.filter((one) => one.querySelector("text").getBBox().width
                > one.querySelector("rect").getBoundingClientRect().width + 1).map((one) => one.textContent)"""
        )
        assert narrow == [], "words fit their blocks"
