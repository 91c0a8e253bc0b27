"""A sick run without a twin: nothing of the training in one process is anywhere, and the sickness still shows."""

import json

import pytest

from course.practise import sick_run
from course.practise.__main__ import main
from course.practise.report import OwnReport
from course.practise.sick import SickRun
from tests.course.test_practise import seed_of

PAIR = {"dp": 2, "pp": 1, "tp": 1, "microbatches": 2}
OPTIONS = ["--dp", "2", "--pp", "1", "--tp", "1", "--microbatches", "2"]


def alone(cause: str, place: str) -> SickRun:
    return sick_run(seed_of((cause, place))).without_twin().under(**PAIR)


def numbers(x: object) -> set[str]:
    """All fractions in plain data, as a report writes them."""
    if isinstance(x, dict):
        x = [*x.values()]
    if isinstance(x, list | tuple):
        return {number for one in x for number in numbers(one)}
    return {f"{x:.4f}"} if isinstance(x, float) else set()


def test_report_data_trace_and_plan_have_no_number_of_the_twin(tmp_path, capsys):
    seed = seed_of(("own-count", "dp"))  # all losses and norms are twice those of one process
    twin = sick_run(seed).under(**PAIR).report()
    theirs = numbers([twin.losses_alone, twin.norms_alone])
    assert len(theirs) == 10 and theirs.isdisjoint(numbers([twin.losses, twin.norms]))
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    main([seed, *OPTIONS, "--no-twin", "--plan", "--report", str(report), "--trace", str(trace)])
    out, data = capsys.readouterr().out, json.loads(report.read_text())
    assert data["losses"] == pytest.approx(twin.losses) and f"{twin.losses[0]:.4f}" in out
    assert theirs.isdisjoint(numbers(data)) and not [name for name in data if "alone" in name]
    assert [number for number in theirs for text in (out, trace.read_text()) if number in text] == []
    assert "one process" not in out.partition("run: --")[2]


def test_one_process_does_not_even_run():
    run = alone("own-count", "dp")
    assert [twin for twin, _ in run.ranks] == [None, None]
    assert type(run.report()) is OwnReport and str(run.report()).count("\n") < 40


@pytest.mark.parametrize(
    ("cause", "place", "shown"),
    [("other-start", "rank 1", "weights"), ("missing-sum", "mlp", "mlp"), ("skipped-step", "rank 1", "update")],
)
def test_its_own_norms_show_what_the_twin_would(cause, place, shown):
    """Both ranks hold the same model, so in a healthy run all their norms are equal."""
    first, second = alone(cause, place).report().own_norms.values()
    differ = [what for what in first if first[what] != pytest.approx(second[what], rel=1e-4)]
    assert shown in differ
    if cause == "missing-sum":
        assert {*differ} == {"mlp", "gradient"}
    if cause == "skipped-step":
        assert differ == ["update"] and second["update"] == 0


def test_an_answer_is_judged_as_with_a_twin(capsys):
    for named, code, word in ((["wide-messages", "tp"], 0, "right\n"), (["sent-twice", "tp"], 1, "wrong\n")):
        with pytest.raises(SystemExit) as ended:
            main([seed_of(("wide-messages", "tp")), "--no-twin", "--answer", *named])
        assert ended.value.code == code and capsys.readouterr().out.startswith(word)


@pytest.mark.parametrize(
    ("more", "said"), [(["--certify"], "compares with one process"), (["--dp", "1"], "one rank is the twin")]
)
def test_what_would_be_a_twin_is_refused(more, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([seed_of(("own-count", "dp")), *OPTIONS, "--no-twin", *more])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1
