"""A check names the mistake; what to do is told by `hint()`, by the second FAIL, and to a grader at once."""

import pytest

from course import check as checks
from course.check import FAIL, check, find, hint, verdict, what_to_do
from course.check.__main__ import main
from course.check.catalogue import EXERCISES
from course.check.exercise import COPIED
from course.check.judge import judge
from lib import comm
from tests.course.answers import notebook

pytestmark = pytest.mark.usefixtures("own_progress")
MISTAKE, REPAIR = "few samples count too much.", "Add up the sums and the counts, then divide once."
WRONG = """def global_gradient(gradient_of_sum, count, group):
    return comm.all_reduce(gradient_of_sum / max(count, 1), group, op="mean")"""


def mean_of_means(gradient_of_sum, count, group):
    return comm.all_reduce(gradient_of_sum / max(count, 1), group, op="mean")


def own_mean(gradient_of_sum, count, group):
    return gradient_of_sum / max(count, 1)


def test_the_second_fail_with_a_mistake_says_what_to_do():
    first, _ = verdict("03.2", mean_of_means)
    assert MISTAKE in first and REPAIR not in first and "What to do: hint(), or the same mistake once more." in first
    other, _ = verdict("03.2", own_mean)
    assert "this rank's own samples" in other and "then divide once" not in other
    second, _ = verdict("03.2", mean_of_means)
    assert f"{MISTAKE} {REPAIR}" in " ".join(second.split()) and "What to do" not in second


def test_a_hint_says_what_to_do_and_no_more(capsys):
    assert what_to_do() == "Nothing is not checked yet: run its check, then hint()."
    verdict("03.2", mean_of_means)
    hint()
    assert capsys.readouterr().out.splitlines() == ["03.2 global_gradient", f"  {REPAIR}"]
    verdict("03.1", find("03.1").right[0])
    assert what_to_do() == "03.1 average_gradients passes." and REPAIR in what_to_do("03.2")
    verdict("03.1", lambda params, group: [p.grad.zero_() for p in params if p.grad is not None])
    assert (
        "no mistake that is known here does this" in what_to_do()
        and 'check("03.1", average_gradients, seed=' in what_to_do()
    )

    def stub(params, group):
        raise NotImplementedError

    verdict("03.1", stub)
    assert "no lines of yours" in what_to_do()
    assert what_to_do("03.4").startswith("03.4 is not checked yet")


def test_a_grader_gets_both_at_once(monkeypatch):
    monkeypatch.setenv("CHECK_STRICT", "1")
    with pytest.raises(AssertionError) as error:
        check("03.2", mean_of_means)
    assert f"{MISTAKE} {REPAIR}" in " ".join(str(error.value).split()) and "What to do" not in str(error.value)


def test_a_case_has_the_hint_and_the_what_to_do():
    (cases,) = judge(find("03.2"), [mean_of_means], 1)
    assert {case.status for case in cases} == {FAIL}
    said = [(" ".join(case.hint.split()), " ".join(case.advice.split())) for case in cases]
    assert all(REPAIR not in first and REPAIR in second for first, second in said)


def test_the_remedy_of_a_report_is_not_told_with_a_mistake_that_has_its_own():
    """In 02.1 two messages may not be in flight, which the general remedy would advise."""

    def all_send_first(x, k, group):
        if k % group.size == 0:
            return x
        comm.send(x, group, (group.rank + k) % group.size).wait()
        return comm.recv(x, group, (group.rank - k) % group.size).wait()

    text, _ = verdict("02.1", all_send_first)
    assert "All ranks wait in send" in text and "the cycle" in text and "start both" not in text


def test_in_a_terminal_one_exercise_is_checked(tmp_path, capsys):
    path = notebook(
        tmp_path, "from lib import comm", WRONG, 'check("03.2", global_gradient)', 'check("03.1", average_gradients)'
    )
    assert main([path, "3.2"]) == 1
    first = capsys.readouterr().out
    assert MISTAKE in first and "What to do: --hint, or the same mistake once more." in first
    assert "03.1" not in first and "points" not in first.partition("\n")[2] and "Next to do" not in first
    checks.forget()
    assert main([path, "03.2"]) == 1 and REPAIR in " ".join(capsys.readouterr().out.split())
    assert main([path, "03.7"]) == 2 and "no cell checks 03.7; there are 03.2, 03.1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["03.2"])
    assert "in which notebook is 03.2?" in capsys.readouterr().err


def test_in_a_terminal_what_to_do_can_be_asked_for(tmp_path, capsys):
    path = notebook(tmp_path, "from lib import comm", WRONG, 'check("03.2", global_gradient)')
    main([path, "03.2", "--hint"])
    assert f"{MISTAKE} {REPAIR}" in " ".join(capsys.readouterr().out.split())
    main([path])
    printed = capsys.readouterr().out
    assert "chapter 4" not in printed and "points in what was checked" in printed and "Next to do" in printed


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=lambda e: e.id)
def test_nearly_every_mistake_has_both_steps(exercise):
    """A hint alone is for the form of an answer, or says why a finding cannot be: it has nothing to repair."""
    hints = {m.hint: m.repair for one in exercise.rows.values() for m in one.mistakes}
    alone = [said for said, repair in hints.items() if not repair and not said.startswith(COPIED)]
    assert len(alone) <= 4 and len(alone) < len(hints) / 3, alone
