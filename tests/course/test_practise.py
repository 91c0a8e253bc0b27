"""Debug this run: each cause can be told from the others by what a reader sees, and no file names it."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from course.check import find
from course.check.judge import judge
from course.practise import sick_run
from course.practise.__main__ import main
from course.practise.answers import HALF, RIGHT, WRONG, verdict_on
from course.practise.causes import CAUSES, COSTS, NUMBERS, place_text
from course.practise.draws import EXERCISES, Case, drawn_case, options_text
from course.practise.inject import BANDWIDTH_BPS, SLOWER, fall_ill
from course.practise.instruments import without_the_cause
from course.practise.report import SAME, RunReport
from course.practise.sick import PractiseError
from lib.layout import Layout
from tests.book.test_repository import ROOT
from tests.on_time import on_time

DROPOUT = 0.1
PIPELINE, TENSOR = {"dp": 2, "pp": 2, "tp": 1, "microbatches": 4}, {"dp": 2, "pp": 1, "tp": 2, "microbatches": 1}
NO_DP = {"dp": 1, "pp": 2, "tp": 2, "microbatches": 4}
TIMED = pytest.mark.timed("seconds of ranks and links are compared")


def seed_of(*sickness: tuple[str, str]) -> str:
    """The first seed that draws this."""
    return next(seed for seed in map(str, itertools.count()) if drawn_case(seed).sickness == sickness)


def places_of(cause: str, **layout: int) -> list[str]:
    return CAUSES[cause].places(Layout(**layout), DROPOUT)


def told_by(report: RunReport, layout: Layout) -> list[tuple[str, str | None]]:
    """The causes of wrong numbers, and of bytes, that a reader would name with nothing but this report."""
    return [*_numbers(report, layout), *_bytes(report)]


def _numbers(report, layout):
    off = [kind for kind, of in report.by_kind.items() if of["gradient"] > SAME]
    sizes = {round(of["size"], 2) for kind, of in report.by_kind.items() if kind in off}
    ranks = {int(re.match(r"rank (\d+)", name)[1]): of for name, of in report.by_rank.items()}
    stages = {f"pp {layout.coordinates(rank)['pp']}" for rank, of in ranks.items() if of["gradient"] > SAME}
    unread = {int(name.split()[1]) for name, (before, all_) in report.sums.items() if before < all_}
    rows = len(report.samples_alone) // layout.dp
    strange = [
        f"dp {i}"
        for i, marks in enumerate(report.samples.values())
        if marks != report.samples_alone[i * rows : (i + 1) * rows]
    ]
    others = [rank for rank, of in ranks.items() if of["weights"] > SAME]
    still = [rank for rank, of in ranks.items() if of["update"] < 0.1]
    copies = max([of["gradient"] or 0 for of in report.copies.values()], default=0)
    # Twice the bytes have a different cause.
    few = [what for what, of in report.sent.items() if of["bytes"] < 1.9 * of["planned_bytes"]]
    more = [what.split()[1] for what in few if report.sent[what]["calls"] > report.sent[what]["planned_calls"]]
    norm = report.norms[0] / report.held_norm
    if strange:
        return [("same-samples", strange[0])]
    if others:
        return [("other-start", f"rank {rank}") for rank in others]
    if unread:
        return [("early-read", f"pp {layout.coordinates(min(unread))['pp']}")]
    if still:
        return [("skipped-step", f"rank {still[0]}")]
    if not off:
        is_dp = abs(norm - layout.dp**0.5) < SAME
        return [("norm-copies", "dp" if is_dp else "tp")] if norm > 1 + SAME else []
    if off == ["norms"] and sizes <= {2.0, 3.0, 4.0}:
        return [("extra-sum", more[0])]
    if len(off) == 1:
        return [("missing-sum", off[0])]
    if len(sizes) == 1 and sizes <= {2.0, 4.0}:
        return [("own-count", "dp" if sizes == {layout.dp} else "microbatches")]
    if copies < SAME and max(sizes) < 0.9 or len(stages) < layout.pp:
        return [("lost-microbatches", min(stages))]
    return [("same-masks", None)]  # which axis, tells a run in which it has one rank


def _bytes(report):
    found = set()
    for what, of in report.sent.items():
        calls, sent = (of[name] / (of[f"planned_{name}"] or 1) for name in ("calls", "bytes"))
        if 1.98 < sent <= 2 and calls in (1, 2) and of["bytes"] > 1000:  # numbers of 8 bytes stay as they are
            found.add(("wide-messages" if calls == 1 else "sent-twice", what.split()[1]))
    return sorted(found)


def is_healthy(report: RunReport, layout: Layout) -> bool:
    same = (abs(a - b) < SAME for a, b in zip(report.losses, report.losses_alone, strict=True))
    planned = all(
        (of["calls"], of["bytes"]) == (of["planned_calls"], of["planned_bytes"]) for of in report.sent.values()
    )
    apart = [x for of in report.copies.values() for x in of.values() if x is not None and x > SAME]
    return all(same) and planned and not apart and not told_by(report, layout)


# ---- each cause shows, and no other ---------------------------------------------------------------------------------

SHOWN = {
    cause: [
        (cause, place, layout)
        for layout in (PIPELINE, TENSOR, NO_DP)
        for place in reversed(places_of(cause, **layout)[-2:])
    ]
    for cause in CAUSES
    if not cause.startswith("slow")
}
IN_TURN = [one for turn in itertools.zip_longest(*SHOWN.values()) for one in turn if one]  # first one of each cause


@pytest.mark.thorough("a run of four ranks for each cause, place and layout", keep=len(SHOWN))
@pytest.mark.parametrize(("cause", "place", "layout"), IN_TURN)
def test_a_report_tells_cause_and_place(cause, place, layout):
    run = sick_run(seed_of((cause, place))).under(dropout=DROPOUT, **layout)
    report, text = run.report(), str(run.report())
    assert told_by(report, run.config.layout) == [(cause, None if cause == "same-masks" else place)], text
    assert not is_healthy(report, run.config.layout)
    assert text.count("\n") < 40 and max(map(len, text.splitlines())) <= 120
    assert not [name for name in CAUSES if name in text]
    if cause == "same-masks":
        without = run.under(**{"dp": 1, "tp": 1} | {place: layout[place]})
        assert told_by(without.report(), without.config.layout) == [(cause, None)]
        assert is_healthy(run.under(dropout=0.0).report(), run.config.layout)


@pytest.mark.thorough("several runs", keep=3)
@pytest.mark.parametrize(
    "layout",
    [
        PIPELINE,
        TENSOR | {"zero": 1, "sequence_parallel": True},
        NO_DP,
        {"dp": 1, "pp": 1, "tp": 1, "microbatches": 2},
        {"dp": 4, "pp": 1, "tp": 1, "microbatches": 2, "zero": 2},
    ],
)
def test_a_healthy_run_shows_nothing(layout):
    run = sick_run("healthy").under(dropout=DROPOUT, **layout)
    report = run.report()
    assert is_healthy(report, run.config.layout), str(report)
    assert report.norms_alone == pytest.approx(report.norms, rel=1e-3) and report.held_norm > 0.1


@pytest.mark.thorough("a run for each")
@pytest.mark.parametrize(
    ("cause", "place", "without"),
    [
        ("missing-sum", "mlp", {"dp": 1}),
        ("early-read", "pp 1", {"pp": 1}),
        ("other-start", "rank 3", {"dp": 1}),
        ("lost-microbatches", "pp 0", {"microbatches": 1}),
        ("wide-messages", "pp", {"pp": 1}),
    ],
)
def test_where_its_place_does_not_exist_a_run_is_healthy(cause, place, without):
    run = sick_run(seed_of((cause, place))).under(dropout=0.0, **PIPELINE | without)
    assert is_healthy(run.report(), run.config.layout)


ZERO = [("missing-sum", "mlp"), ("early-read", "pp 0"), ("skipped-step", "rank 3"), ("lost-microbatches", "pp 1")]


@pytest.mark.thorough("more layouts")
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("cause", "place"), ZERO)
def test_with_zero_it_is_the_same_sickness(cause, place, zero):
    run = sick_run(seed_of((cause, place))).under(dropout=0.0, **PIPELINE, zero=zero)
    report = run.report()
    assert told_by(report, run.config.layout)[0] == (cause, place), str(report)


@TIMED
@pytest.mark.parametrize(("rank", "layout"), [("rank 2", PIPELINE), ("rank 1", TENSOR)])
def test_a_slow_rank_is_busy_and_the_others_wait_for_it(rank, layout):
    report = sick_run(seed_of(("slow-rank", rank))).under(dropout=0.0, **layout).report()
    assert max(report.busy_s, key=report.busy_s.get) == rank
    with on_time():
        assert report.busy_s[rank] > 0.1 and report.waited_for_s[rank] > 0.05
    assert told_by(report, Layout(**layout)) == []


@TIMED
@pytest.mark.parametrize(("axis", "layout"), [("pp", PIPELINE), ("tp", TENSOR)])
def test_a_slow_link_is_measured_alone(axis, layout):
    report = sick_run(seed_of(("slow-link", axis))).under(dropout=0.0, **layout).report()
    ratios = {name: took / planned for name, (took, planned) in report.links_s.items()}
    with on_time():
        assert ratios[axis] > SLOWER / 2 and min(ratios.values()) < SLOWER / 8
        assert max(of[axis][1] for of in report.waits_s.values()) > SLOWER * 1e4 / BANDWIDTH_BPS
    assert told_by(report, Layout(**layout)) == []


@TIMED
def test_a_healthy_run_has_no_slow_rank_and_no_slow_link():
    report = sick_run("healthy").under(dropout=0.0, **PIPELINE).report()
    with on_time():
        assert max(report.busy_s.values()) < 0.1
        assert max(took / planned for took, planned in report.links_s.values()) < SLOWER / 4


@pytest.mark.thorough("a run for each")
@pytest.mark.parametrize("seed", ["15.3", "15.3C"])
def test_two_causes_show_together(seed):
    case, run = drawn_case(seed), sick_run(seed)
    assert told_by(run.report(), run.config.layout) == [*case.sickness], str(run.report())


def test_certify_and_the_trace_are_of_the_sick_run(tmp_path):
    run = sick_run(seed_of(("missing-sum", "mlp"))).under(dropout=0.0, **TENSOR)
    assert run.certify()[1] > 0.1
    assert max(sick_run("healthy").under(dropout=0.0, **TENSOR).certify()) < 1e-8
    run.trace().save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


# ---- what a seed draws ----------------------------------------------------------------------------------------------


def test_seeds_draw_every_cause_one_or_two_on_two_to_four_ranks():
    cases = [drawn_case(str(seed)) for seed in range(300)]
    drawn = [name for case in cases for name, _ in case.sickness]
    assert {*drawn} == {*CAUSES} and {len(case.sickness) for case in cases} == {1, 2}
    assert {case.config.layout.num_ranks for case in cases} == {2, 4}
    for case in cases:
        for name, place in case.sickness:
            possible = CAUSES[name].places(case.config.layout, case.config.model.dropout)
            assert place in possible and len(possible) > 1
        assert [CAUSES[name].group for name, _ in case.sickness] in ([NUMBERS], [COSTS], [NUMBERS, COSTS])


def test_a_seed_draws_the_same_everywhere():
    said = repr([(drawn_case(str(seed)).sickness, options_text(drawn_case(str(seed)).config)) for seed in range(50)])
    assert hashlib.sha256(said.encode()).hexdigest()[:12] == "41f5f7291fdb"


def test_each_row_of_an_exercise_has_a_different_cause():
    for number, groups in EXERCISES.items():
        rows = find(number).rows
        drawn = [drawn_case(number + row).sickness for row in rows]
        for place in range(len(groups)):
            assert len({sickness[place][0] for sickness in drawn}) == len(rows) == 4
        assert all(f'sick_run("{number}", row="{row}")' in one.task for row, one in rows.items())


# ---- no file names it -----------------------------------------------------------------------------------------------


def words_of(case: Case) -> list[str]:
    return [word for name, _ in case.sickness for word in (name, name.replace("-", "_"), CAUSES[name].says)]


def test_nothing_that_a_reader_gets_names_the_cause(tmp_path):
    """Report, data, trace, plan and the next steps; and the arguments of all processes while it runs."""
    seed = seed_of(("skipped-step", "rank 1"))
    command = [sys.executable, "-m", "course.practise", seed, "--report", "r.json", "--trace", "t.json", "--plan"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as program:
        arguments = set()
        while program.poll() is None:
            arguments |= {read(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
            time.sleep(0.2)
        out = program.stdout.read()
    assert program.returncode == 0 and "run: --" in out
    mine = [text for text in arguments if "course.practise" in text]
    texts = [out, (tmp_path / "r.json").read_text(), (tmp_path / "t.json").read_text(), *mine]
    assert mine or sys.platform == "darwin"
    assert [word for word in words_of(drawn_case(seed)) for text in texts if word in text] == []


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def test_a_traceback_leaves_out_what_makes_a_run_ill():
    config = sick_run(0).under(**TENSOR).config
    with pytest.raises(AttributeError) as caught:
        without_the_cause(fall_ill)((("slow-link", "tp"),), config, 0, None)  # which has no stack to enter
    text = "".join(traceback.format_exception(caught.value))
    assert "in guarded" in text and "inject.py" not in text


def test_a_grader_gives_ranks_no_sickness():
    """An answer could read what the code around it knows."""
    for number in EXERCISES:
        for one in find(number).rows.values():
            (possible,) = (cell.cell_contents for cell in one.body.__closure__)
            assert {name for causes in possible.values() for name in causes} == {*CAUSES}


# ---- answers --------------------------------------------------------------------------------------------------------

ONE, TWO = (("extra-sum", "tp"),), (("missing-sum", "norms"), ("slow-rank", "rank 2"))


@pytest.mark.parametrize(
    ("sickness", "named", "status"),
    [
        (ONE, [("extra-sum", "tp")], RIGHT),
        (ONE, [("extra-sum", "dp")], HALF),
        (ONE, [("missing-sum", "tp")], WRONG),
        (ONE, [("extra-sum", "tp"), ("slow-rank", "0")], HALF),
        (TWO, [("missing-sum", "norms"), ("slow-rank", "2")], RIGHT),
        (TWO, [("slow-rank", "Rank 2"), ("missing-sum", "Norms")], RIGHT),
        (TWO, [("missing-sum", "norms")], HALF),
        (TWO, [("missing-sum", "mlp"), ("slow-rank", "rank2")], HALF),
        (TWO, [("slow-link", "dp"), ("own-count", "dp")], WRONG),
        (TWO, [], WRONG),
    ],
)
def test_an_answer_is_right_half_right_or_wrong(sickness, named, status):
    assert verdict_on(sickness, named)[0] == status


def test_a_hint_says_where_to_look_and_never_what_it_is():
    for true, named in itertools.permutations(CAUSES, 2):
        place = places_of(true, **PIPELINE | {"tp": 2})[0]
        status, said = verdict_on(((true, place),), [(named, "dp")])
        assert status == WRONG and CAUSES[true].look in said and CAUSES[named].shows in said
        assert true not in said.replace(CAUSES[named].shows, "")
    said = verdict_on(TWO, [TWO[0]])[1]
    assert "second cause" in said and "slow-rank" not in said


def test_one_cause_twice_is_no_answer_and_its_name_may_be_written_in_any_case():
    one = find("15.1")
    ((name, place),) = drawn_case("15.1").sickness
    answers = [{name: place}, {name.upper(): [place]}, {name.upper(): place, name: place}, {name: place, "?": place}]
    cases = judge(one, [lambda answer=answer: answer for answer in answers], seed=1)
    hints = [case.hint for (case,) in cases]
    assert hints[:2] == ["", ""] and "several causes" in hints[2] and "a key that is not" in hints[3]


@pytest.mark.parametrize(
    ("written", "place"),
    [("DP", "dp"), ("dp=1", "dp 1"), ("dp1", "dp 1"), ("3", "rank 3"), (2, "rank 2"), (" Norms", "norms")],
)
def test_a_place_may_be_written_in_several_forms(written, place):
    assert place_text(written) == place


def test_an_answer_on_the_command_line(capsys):
    seed = seed_of(("wide-messages", "tp"))
    for named, code, word in ((["wide-messages", "tp"], 0, "right\n"), (["sent-twice", "tp"], 1, "wrong\n")):
        with pytest.raises(SystemExit) as ended:
            main([seed, "--answer", *named])
        assert ended.value.code == code and capsys.readouterr().out.startswith(word)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "which run?"),
        (["7", "--answer", "bad-luck", "dp"], "'bad-luck' is not in the catalogue"),
        (["7", "--zero", "3", "--dp", "2", "--pp", "1", "--tp", "1"], "--zero 3: practice runs have"),
        (["7", "--dp", "3"], "cannot be split over --dp 3"),
        (["7", "--dp", "16", "--global-batch", "16"], "ranks: practice runs have at most 8"),
        (["7", "--steps", "1"], "--steps 1: practice runs have"),
    ],
)
def test_what_is_impossible_is_one_sentence(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1


def test_all_causes_are_listed(capsys):
    main(["--causes"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(cause.name in said and cause.says in said and cause.where in said for cause in CAUSES.values())
    assert 10 <= len(CAUSES) <= 14


def test_a_layout_that_is_impossible_is_refused():
    with pytest.raises(PractiseError, match="global_batch"):
        sick_run(7).under(dp=3, microbatches=1)
