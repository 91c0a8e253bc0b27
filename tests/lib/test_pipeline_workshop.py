"""Verdicts on schedules that somebody has typed: right, wrong, and what to try next."""

import random
from collections import Counter
from itertools import product

import pytest

from course.workshop.typed import Par, workshop
from lib.pipeline.lower import lower
from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import Schedule, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from lib.pipeline.simulate import Costs, simulate

FIFTEEN = """
rank 0: 0F0 0F1 0F2 0F3 0I0 0W0 0I1 0F4 0W1 0F5 0I2 0I3 0W2 0W3 0I4 0W4 0I5 0W5
rank 1: 1F0 1F1 1F2 1F3 1I0 1W0 1I1 1W1 1I2 1F4 1I3 1F5 1W2 1W3 1I4 1W4 1I5 1W5
rank 2: 2F0 2F1 2F2 2I0 2W0 2I1 2F3 2I2 2W1 2I3 2F4 2W2 2F5 2I4 2W3 2I5 2W4 2W5
rank 3: 3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3F4 3I4 3F5 3I5 3W2 3W3 3W4 3W5
"""


def halves(schedule):
    """Each B as I and, at once, W."""
    rows = []
    for row in schedule.actions:
        words = [[f"{s}I{m}", f"{s}W{m}"] if op == "B" else [f"{s}{op}{m}"] for s, op, m in row]
        rows.append(" ".join(word for pair in words for word in pair))
    return "\n".join(rows)


# ---- par ------------------------------------------------------------------------------------------------------------


def test_par_is_made_of_the_books_schedules():
    par = Par()
    seen = {s.name: (s.time, s.kept, s.in_limit) for s in par.scores()}
    assert seen == {
        "ZB-H1": (21, (4, 4, 4, 4), True),
        "ZB-H2": (21, (6, 6, 6, 6), False),
        "1F1B": (27, (4, 3, 2, 1), True),
        "GPipe": (27, (6, 6, 6, 6), False),
        "naive": (72, (1, 1, 1, 1), True),
    }
    assert [s.time for s in par.scores()] == sorted(s.time for s in par.scores())
    assert par.time == par.least() == 21 and par.most == 4
    assert Par(limit=3).time == 72 and Par(limit=3).least() == 22
    assert Par(4, 8, costs=Costs(2, 3, 2)).time == 65


def test_a_rank_with_several_stages_has_the_same_work():
    par = Par(4, 8)
    score = next(s for s in par.scores() if s.name.startswith("interleaved"))
    assert (score.time, score.kept) == (28.5, (5.5, 4.5, 3.5, 2.5))
    assert par.least(2) == 24 + 1.5
    assert workshop(interleaved(4, 8, 2).to_text(), par).score.time == 28.5


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize(
    "costs", [Costs(), Costs(2, 3, 2), Costs(1, 1, 3), Costs(3, 1, 2, latency=0.5, transfer=0.1)]
)
def test_nothing_is_faster_than_the_least(costs):
    for n, m, limit in product((1, 2, 3, 4, 6), (1, 2, 5, 6, 12), (1, 2, 4, 12)):
        par = Par(n, m, limit, costs)
        for score in par.scores():
            v = 2 if score.name.startswith("interleaved") else 1
            assert score.time >= par.least(v) - 1e-9 or not score.in_limit, (n, m, limit, score)
    if costs == Costs():
        assert all(Par(n, m).time == Par(n, m).least() for n in (2, 3, 4, 8) for m in (n, 2 * n, 4 * n))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Par(0), "num_ranks=0 must be at least 1"),
        (lambda: Par(2, 0), "num_microbatches=0"),
        (lambda: Par(2, 2, 0), "limit=0"),
        (lambda: Par(2, 2, costs=Costs([1, 2])), "one number each"),
    ],
)
def test_a_par_that_is_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- right ----------------------------------------------------------------------------------------------------------


def test_in_a_terminal():
    lines = repr(workshop(one_f_one_b(2, 3).to_text(), Par(2, 3))).splitlines()
    assert lines == [
        "It works, in 12 units: 2 over par, which is 10.",
        "         time  bubble  kept by each rank",
        "  ZB-H1    10   10.0%  2 2",
        "  ZB-H2    10   10.0%  3 3                too much",
        "> yours    12   25.0%  2 1",
        "  1F1B     12   25.0%  2 1",
        "  GPipe    12   25.0%  3 3                too much",
        "  naive    18   50.0%  1 1",
        "rank 0  F0 F1 ·  ·  B0--- F2 B1--- ·  B2---",
        "rank 1  ·  F0 B0--- F1 B1--- F2 B2---",
        "The previous stage waits for a full B and needs half of it. Write 1I2 1W2 for 1B2, and the same "
        "elsewhere; then put a W where its rank waits.",
    ]


def test_the_advice_leads_from_1f1b_to_par_and_beyond():
    one = workshop(one_f_one_b(4, 6).to_text())
    assert one.score.time == 27 and "Write 1I5 1W5 for 1B5" in one.advice
    two = workshop(halves(one_f_one_b(4, 6)))
    assert two.score.time == 24 and "3W4 delays 3F5" in two.advice
    three = workshop(zb_h1(4, 6).to_text())
    assert three.score.time == 21 and "No order is faster: 21" in three.advice
    assert "keep 16 microbatches together" in three.advice
    four = workshop(FIFTEEN)
    assert four.score.time == 21 and "keep 15 microbatches together" in four.advice and "that is par" in repr(four)


def test_a_hole_that_a_weight_gradient_could_fill_and_does():
    verdict = workshop("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1W0 1F1 1I1 1W1", Par(2, 2))
    assert verdict.advice == "Rank 0 is idle from 4 to 6. Its 0W0 could run then: put it before 0I1."
    better = workshop("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1", Par(2, 2))
    assert better.score.time < verdict.score.time
    assert "1W0 delays 1F1" in better.advice
    assert workshop("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1", Par(2, 2)).score.time == 7


def test_the_longest_hole_is_named_first():
    verdict = workshop("0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2\n1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2", Par(2, 3, 3))
    assert verdict.advice == "Rank 0 is idle from 6 to 9. Its 0W0 could run then: put it before 0I2."


def test_a_w_holds_nobody_up_on_the_rank_that_ends_last():
    text = "0F1 0F0 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert workshop(text, Par(2, 3, 3)).advice.startswith(
        "Rank 0 is idle from 2 to 4, and no W is ready. The input of 0I0 must"
    )


def test_messages_lengthen_the_wait():
    assert Par(3, 2, costs=Costs(latency=1, transfer=0.5)).least() == 6 + (3 + 2 * (1 + 2 * 1.5)) - 2
    assert Par(3, 4, limit=9, costs=Costs(latency=1, transfer=0.5)).least() == 12 + 3 + 2 * (1 + 2 * 1.5) - 4
    assert Par(3, 9, limit=9, costs=Costs(latency=1, transfer=0.5)).least() == 27 + 2 * (1 + 1.5)


def test_more_than_the_limit():
    verdict = workshop(zb_h2(4, 6).to_text())
    assert verdict.advice.startswith("Rank 0 keeps 6 microbatches; the limit is 4.")
    assert "but a rank keeps more than 4" in verdict.headline()
    assert workshop(zb_h2(4, 6).to_text(), Par(limit=6)).headline() == "It works, in 21 units: that is par."


def test_faster_than_par():
    verdict = workshop(zb_h1(4, 6).to_text(), Par(limit=5, costs=Costs(2, 3, 2)))
    assert "that is par" in verdict.headline()
    slow = Par(limit=1)
    assert workshop(naive(4, 6).to_text(), slow).headline() == "It works, in 72 units: that is par."
    assert (
        workshop(FIFTEEN, slow).headline()
        == "It works, in 21 units: 51 under par, which is 72, but a rank keeps more than 1."
    )


@pytest.mark.thorough("more ranks, sizes and kinds", keep=3)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_every_schedule_of_the_book_gets_a_score_and_advice(n):
    for m in (1, 2, 4, 12):
        for schedule in (naive(n, m), gpipe(n, m), one_f_one_b(n, m), zb_h1(n, m), zb_h2(n, m)):
            for form in (schedule, lower(schedule)):
                verdict = workshop(form.to_text(), Par(n, m))
                assert verdict.score.time == simulate(schedule).makespan
                assert verdict.advice and not verdict.problem
                assert verdict.score in verdict.rows()


def test_fifteen_is_the_least_that_par_can_be_played_with():
    """All orders of 4 ranks and 6 microbatches in 21 units: every unit, each rank does F, I, W or nothing."""
    count, units = 6, 21

    def exists(limit):
        seen, todo = set(), [(0, ((0, 0, 0),) * 4)]
        while todo:
            time, state = todo.pop()
            if time == units:
                return True  # every rank has done 18 units of work and waited for 3
            ways = []
            for r, (f, i, w) in enumerate(state):
                way = [(f, i, w)] if time - f - i - w < units - 3 * count else []
                way += [(f + 1, i, w)] if f < count and f - w < limit[r] and (r == 0 or state[r - 1][0] > f) else []
                way += [(f, i + 1, w)] if i < f and (r == 3 or state[r + 1][1] > i) else []
                way += [(f, i, w + 1)] if w < i else []
                ways.append(way)
            for after in product(*ways):
                hopeless = any(
                    i < count and time + 1 + count - i > units - 1 - r for r, (_, i, _) in enumerate(after)
                )
                if not hopeless and (time + 1, after) not in seen:
                    seen.add((time + 1, after))
                    todo.append((time + 1, after))
        return False

    kept = workshop(FIFTEEN).score.kept
    assert kept == (4, 4, 3, 4) and exists(kept)
    less = [limit for limit in product(range(1, 7), repeat=4) if sum(limit) == 14]
    assert not any(map(exists, less))


# ---- wrong ----------------------------------------------------------------------------------------------------------

WRONG = [  # typed for 2 ranks and 2 microbatches; what is said, and why
    ("", "there is no action in it", "F is forward, B the full backward"),
    ("0F0 forward", "'forward' is not an action", "F is forward, B the full backward"),
    ("0F" + "9" * 5000, "too long for a stage or a microbatch", "Write a line for each rank"),
    ("0F0 0B0\n1F0 1B0", "this is for 2 ranks and 1 microbatches, par is for 2 and 2", "where the work is the same"),
    ("0F0 0F1 0B0 0B1", "this is for 1 ranks and 2 microbatches", "where the work is the same"),
    ("rank 0: 0F0\nrank 5: 1F0", "line 2 says rank 5", "Lines are ranks"),
    ("0F0 0F1 0B0 0B1\n2F0 2F1 2B0 2B1", "no rank has stage 1", "passes through all stages"),
    ("0F0 0F1 0B0 0B1\n0F0 1F1 1B0 1B1", "0F0 is on rank 1, but rank 0 has stage 0", "One rank holds the weights"),
    ("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1\n1F0 1F1 1B0 1B1", "different numbers of stages", "would be the slowest"),
    ("0F0 0F1\n1F0 1F1", "it has no backward", "An evaluation"),
    ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1 1B1", "1B1 occurs 2 times", "count twice"),
    ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "1B1 is missing", "its gradient is missing"),
    ("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1B1", "1I0 is half a backward; 1W0 is missing", "these weights lack a gradient"),
    ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1 1W1", "1B1 is the full backward", "Write B, or I and later W"),
    ("0F0 0F1 0B0 0B1\n1F0 1W0 1I0 1F1 1B1", "1W0 comes before 1I0", "W uses gradients that I kept"),
    ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", ">0B0<", "before a wait"),
    ("0F0 0F1 0SEND_F0 0B0 0B1\n1F0 1B0 1F1 1B1", "is missing", "once forward and once backward"),
]


@pytest.mark.parametrize(("text", "problem", "why"), WRONG, ids=lambda part: part[:24])
def test_what_is_wrong_is_said_and_why(text, problem, why):
    verdict = workshop(text, Par(2, 2))
    assert problem in verdict.problem and why in verdict.advice
    assert verdict.score is None and verdict.timeline is None and verdict.rows() == []
    for shown in (repr(verdict), verdict._repr_html_()):
        assert "This cannot work." in shown and "Traceback" not in shown
    assert problem in repr(verdict) and why in repr(verdict)


def test_the_circle_is_shown():
    shown = repr(workshop("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", Par(2, 2)))
    assert "rank 0 at 0B0 waits for 1B0, which rank 1 does later" in shown
    assert "rank 1 at 1F1 waits for 0F1, which rank 0 does later" in shown


@pytest.mark.thorough("seconds of several processes")
def test_nothing_that_is_typed_raises():
    """Right schedules with an action taken away, doubled, moved or changed, and plain nonsense."""
    draw = random.Random(0)
    sources = [one_f_one_b(3, 4).to_text(), zb_h1(3, 4).to_text(), lower(zb_h1(3, 4)).to_text()]
    outcomes = Counter()
    for _ in range(600):
        words = [line.split(" ")[2:] for line in draw.choice(sources).splitlines()]
        for _ in range(draw.choice((1, 1, 2))):
            row = draw.choice(words)
            i, j = draw.randrange(len(row)), draw.randrange(len(row))
            change = draw.choice(("drop", "double", "swap", "next", "next", "other", "noise"))
            if change == "drop" and len(row) > 1:
                row.pop(i)
            elif change == "double":
                row.insert(j, row[i])
            elif change == "swap":
                row[i], row[j] = row[j], row[i]
            elif change == "next":
                row[i - 1], row[i] = row[i], row[i - 1]
            elif change == "other":
                row[i] = f"{draw.randrange(4)}{draw.choice('FBIW')}{draw.randrange(5)}"
            else:
                row[i] = draw.choice(("<b>", "0f0", "-1F0", "0F", "rank 7:", "٣F0", "F0", "\x00"))
        text = "\n".join(map(" ".join, words))
        verdict = workshop(text, Par(3, 4))
        assert repr(verdict) and verdict._repr_html_()
        try:
            right = Schedule.from_text(text)
            prove(right)
            is_right = (right.num_ranks, right.num_microbatches, right.num_stages) == (3, 4, 3)
        except ScheduleError:
            is_right = False
        assert is_right == (verdict.score is not None), text
        outcomes[is_right] += 1
    assert min(outcomes.values()) > 40
    assert workshop(None).problem and workshop(7).problem


def test_what_is_typed_is_no_html():
    assert "<script>" not in workshop("<script>alert(1)</script>")._repr_html_()
    shown = workshop(one_f_one_b(2, 2).to_text(), Par(2, 2), name="<img src=x>")._repr_html_()
    assert "<img" not in shown and "&lt;img" in shown
    assert shown.count("<tr>") == 1 + len(workshop(one_f_one_b(2, 2).to_text(), Par(2, 2)).rows())
    assert "<strong>27</strong>" in workshop(one_f_one_b(4, 6).to_text())._repr_html_()
