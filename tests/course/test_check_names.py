"""A name is given only to the mistake that was made: all that it predicts is seen, and some of it is wrong."""

from dataclasses import replace

import pytest
import torch

from course.check.catalogue import EXERCISES
from course.check.compare import ANYTHING, same, same_in_float32
from course.check.exercise import Exercise, Mistake
from course.check.judge import judge
from course.check.slips import named_slip
from course.check.tried import try_changed
from tests.course.test_check import marks

DOUBLED, FOUR = Mistake("It is doubled.", lambda: (2, 2)), Mistake("It is 4.", lambda: (4, 4))
FIRST = Mistake("The first is doubled.", lambda: (2, 1), about=("first",))
LOOSE = Mistake("Something is wrong.", lambda: (ANYTHING, 1))


def verdicts(answer, *mistakes, ranks=(1,), parts=("",), right=1):
    """The hints on an answer of two numbers, of which both should be `right`."""
    exercise = Exercise(
        id="00.2",
        title="two",
        points=1,
        body=lambda answer, group, given: dict(zip(("first", "second"), answer(), strict=True)),
        inputs=lambda generator, n: [{}] * n,
        reference=lambda given: [{"first": right, "second": right}] * len(given),
        mistakes=mistakes,
        ranks=ranks,
        parts=parts,
    )
    (cases,) = judge(exercise, [answer], 1)
    return [case.mistake.hint if case.mistake else case.status for case in cases]


def of_size(few, many):
    """A program that returns one thing on two ranks, and another on three."""

    def program():
        return few if torch.distributed.get_world_size() == 2 else many

    return program


def test_a_mistake_is_named_if_all_that_it_predicts_is_seen():
    assert verdicts(lambda: (2, 2), FOUR, DOUBLED) == ["It is doubled."]
    assert verdicts(lambda: (2, 3), FOUR, DOUBLED) == ["FAIL"]
    assert verdicts(lambda: (2, 3), FIRST) == ["The first is doubled."]


def test_it_must_fit_in_each_case():
    """With two ranks the sum of both is the double, and with three it is not."""
    summed = Mistake("It is summed.", of_size((2, 2), (3, 3)))
    assert verdicts(summed.wrong, DOUBLED, summed, ranks=(2, 3)) == ["It is summed."] * 2
    assert verdicts(of_size((2, 2), (5, 5)), DOUBLED, summed, ranks=(2, 3)) == ["FAIL", "FAIL"]
    assert verdicts(of_size((2, 2), (1, 1)), DOUBLED, summed, ranks=(2, 3)) == ["FAIL", "PASS"]
    right_with_two = Mistake("It is right with two.", of_size((1, 1), (2, 2)))
    assert verdicts(of_size((1, 1), (2, 2)), DOUBLED, right_with_two, ranks=(2, 3)) == [
        "PASS",
        "It is right with two.",
    ]


def test_it_must_fit_in_each_part():
    parts = ("first", "second")
    assert verdicts(lambda: (2, 2), DOUBLED, parts=parts) == ["It is doubled."] * 2
    assert verdicts(lambda: (2, 1), DOUBLED, parts=parts) == ["FAIL", "PASS"]
    assert verdicts(lambda: (2, 3), FIRST, parts=parts) == ["The first is doubled.", "FAIL"]


def test_what_it_predicts_must_be_wrong():
    assert verdicts(lambda: (7, 1), LOOSE) == ["Something is wrong."]
    loose = replace(LOOSE, about=("first",))
    assert verdicts(lambda: (1, 7), loose) == ["FAIL"]
    assert verdicts(lambda: (7, 8), loose) == ["Something is wrong."]


@pytest.mark.parametrize("exercise_id", [pytest.param(i, marks=marks(EXERCISES[i])) for i in sorted(EXERCISES)])
def test_no_mistake_is_named_for_results_that_it_does_not_predict(exercise_id):
    for row, exercise in EXERCISES[exercise_id].rows.items():
        tried = try_changed(replace(exercise, ranks=exercise.ranks[:1]), seed=3, count=20)
        assert len(tried) == 20 and all(as_it_must for as_it_must, _ in tried), (row, tried)


# ---- dtype and digits -----------------------------------------------------------------------------------------------

X = torch.tensor([1 / 3, 2 / 3, 5.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (X.float(), "Your tensor is float32: x must be float64, like what was given."),
        (X.half().float().bfloat16(), "Your tensor is bfloat16: x must be float64"),
        (X.float().double(), "Your tensor is float32 on the way, and half of the digits are lost: x."),
        (X * (1 + 1e-8), "x: right in six digits, and not in nine. Is a tensor float32 on the way?"),
        (X.float() * 2, ""),
        (X * (1 + 1e-12), None),
    ],
)
def test_a_tensor_in_float32_is_told(found, words):
    assert same({"x": found}, {"x": X}) is (words is None)
    assert same({"x": [found]}, {"x": [X]}) is (words is None)
    if words is not None and found.dtype != torch.bfloat16:
        said = named_slip([{"x": found}], [{"x": X}])
        assert said.startswith(words) and bool(said) == bool(words)
        assert named_slip([{"x": {"a": [found]}}], [{"x": {"a": [X]}}]) == said


def test_a_key_too_many_is_no_slip_of_digits():
    right = {"x": {"a": X}}
    assert named_slip([{"x": {"a": X, "b": 1}}], [right]) == ""


def test_tensors_that_are_not_float64_are_compared_too():
    short, off = X.float(), X.float() * (1 + 2**-22)
    assert named_slip([{"x": off}], [{"x": short}]).startswith("x: right in six digits")


def test_data_that_is_moved_agrees_in_each_bit():
    assert same({"x": X / 3 * 3 + 1e-16}, {"x": X}) and not same({"x": X / 3 * 3 + 1e-16}, {"x": X}, {"x": 0})
    assert same({"x": X.clone()}, {"x": X}, {"x": 0}) and not same({"x": X.float()}, {"x": X}, {"x": 0})
    said = named_slip([{"x": X * (1 + 1e-12)}], [{"x": X}], {"x": 0})
    assert said == "x: right in nine digits, and not in all. What is only moved keeps each bit."


def test_a_number_may_be_computed_in_any_precision():
    assert same({"x": torch.tensor(1 / 3)}, {"x": 1 / 3}) and same({"x": 1}, {"x": torch.tensor(1.0).double()})
    assert not same_in_float32(1.0, X) and not same_in_float32(X, 1.0) and same_in_float32(X.float(), X)
