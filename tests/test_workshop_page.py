"""*Try a schedule* in a browser: its rules against `lib.pipeline`, and what a reader does with mouse and keyboard.

It needs no built book: the scripts and their words are put into a blank page.
"""

import json
import math
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.schedules.fault import ScheduleError
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from lib.pipeline.simulate import Costs
from lib.pipeline.workshop import WHY, Par, Verdict, workshop
from tests.book_project import BOOK, load
from tools.browser import chromium, open_browser

pytestmark = [pytest.mark.browser, pytest.mark.skipif(chromium() is None, reason="no Chromium")]

extension = load("book_workshop")
WORDS = extension.sentences()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


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


def ask(page, what: str, asked: list) -> list:
    """What the script says of each: `what` is an expression of `of`, its rules, and of `text` and `par`."""
    script = f"""text => {{
        const {{ asked, words }} = JSON.parse(text), of = scheduler(words);
        const say = (text, par) => ({what});
        return JSON.stringify(asked.map(([text, par]) => say(text, of.makePar(par))));
    }}"""
    plain = [(text, plain_par(par)) for text, par in asked]
    return json.loads(page.evaluate(script, json.dumps({"asked": plain, "words": WORDS})))


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


def test_a_thousand_random_schedules(page, say):
    rng = random.Random(0)
    asked = [some_text(rng, is_right=i % 5 < 2) for i in range(999)]
    asked.append((extension.LATE_FIRST, Par(2, 5, 5)))  # which chance finds too seldom
    kinds, advice = Counter(), Counter()
    for said, (text, par) in zip(ask(page, SAYS, asked), asked, strict=True):
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
        advice[next(name for name, words in WORDS["advice"].items() if same_words(words, ours.advice))] += 1
    say(f"schedule.js and lib.pipeline agree on {kinds.total()} schedules: {dict(kinds.most_common())}")
    assert kinds["right"] >= 400 and set(kinds) == {"right", *(fault.name for fault in WHY)}
    assert min(kinds.values()) >= 5, kinds
    assert set(advice) == set(WORDS["advice"]), advice


def test_par_and_its_scores(page):
    costs = Costs(), Costs(2, 3, 2), Costs(1, 1, 3), Costs(3, 0.5, 1.3)
    pars = [Par(n, m, limit, cost) for n in (1, 2, 4, 8) for m in (1, 3, 8) for limit in (None, 2) for cost in costs]
    what = "({ scores: par.scores.map(of.words), time: par.time, most: par.most, least: [1, 2, 3].map(par.least) })"
    for said, par in zip(ask(page, what, [("", par) for par in pars]), pars, strict=True):
        assert said["scores"] == [list(score.words()[:4]) for score in par.scores()], par
        assert (said["time"], said["most"]) == (par.time, par.most)
        assert said["least"] == [par.least(1), par.least(2), par.least(3)]


def test_numbers_are_written_as_python_writes_them(page):
    rng = random.Random(3)
    numbers = [0, 1, 2.5, 1 / 3, 0.1 + 0.2, 1e-5, 123456.7, 1234567, 1e20, 0.0001, 19.499999999999996, 999999.5]
    numbers += [rng.uniform(0, 10 ** rng.randint(-6, 8)) for _ in range(300)]
    shares = [k / 32 for k in range(33)] + [rng.random() for _ in range(300)]
    script = "([words, x, y]) => [x.map(scheduler(words).g), y.map(scheduler(words).percent)]"
    said = page.evaluate(script, [WORDS, numbers, shares])
    assert said == [[f"{x:g}" for x in numbers], [f"{x:.1%}" for x in shares]]


def test_each_maker_is_pythons(page):
    makers = {"naive": naive, "gpipe": gpipe, "oneFOneB": one_f_one_b, "zbH1": zb_h1, "zbH2": zb_h2}
    script = "([words, name, n, m]) => (({ toText, makers }) => toText(makers[name](n, m, 2)))(scheduler(words))"
    for n, m in ((1, 1), (2, 1), (3, 5), (4, 8), (8, 3)):
        for name, make in makers.items():
            assert page.evaluate(script, [WORDS, name, n, m]) == make(n, m).to_text().strip()
    for n, m in ((2, 2), (4, 8)):
        assert page.evaluate(script, [WORDS, "interleaved", n, m]) == interleaved(n, m, 2).to_text().strip()


def test_a_sentence_that_python_says_otherwise_by_now_stops_the_build():
    assert extension.with_holes("1F0 waits from 1 to 1.5.", "1F0", "1", "1.5") == "{0} waits from {1} to {2}."
    with pytest.raises(ValueError, match="does not say 2F0"):
        extension.with_holes("1F0 waits.", "2F0")
