"""The engine's own mistakes: whatever an exercise lists, a slip in its results is named, and never taken for right."""

import pytest
import torch

from course.check.catalogue import EXERCISES
from course.check.slips import named_slip
from course.check.tried import try_slips

GOT = [
    {"sum": torch.tensor([1.0, 2.0]), "count": 3, "name": "a", "times": {"F": 1.0, "B": 2.0}},
    {"sum": torch.tensor([3.0, 4.0]), "count": 3, "name": "b", "times": {"F": 1.0, "B": 2.0}},
]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"sum": lambda x: 2 * x},
            "The value of sum is 2 times the right one, and there are 2 ranks: a sum in place of a mean.",
        ),
        (
            {"sum": lambda x: x / 2},
            "The value of sum is 1/2 of the right one, and there are 2 ranks: a mean in place of a sum.",
        ),
        (
            {"sum": lambda x: 1000 * x, "count": lambda x: 1000 * x},
            "Each of the 2 values that are wrong is 1000 times the right one.",
        ),
        ({"times": lambda x: {k: 3 * v for k, v in x.items()}}, "The value of times is 3 times the right one."),
        ({"times": lambda x: x | {"B": 3.0}}, ""),
        ({"times": lambda x: x | {"W": 3.0}}, ""),
        ({"count": lambda x: x - 1}, "The value of count is 1 less than the right one."),
        ({"count": lambda x: x + 1}, "The value of count is 1 more than the right one."),
        ({"sum": lambda x: x[1:]}, "The value of sum is right, but the first is missing."),
        ({"sum": lambda x: x[:-1]}, "The value of sum is right, but the last is missing."),
        ({"sum": lambda x: 2 * x, "count": lambda x: 3 * x}, ""),
        ({"sum": lambda x: x + torch.tensor([0.0, 1.0])}, ""),
        ({"name": lambda x: x + x}, ""),
        ({"sum": lambda x: 2 * x, "name": lambda x: x + x}, ""),
    ],
)
def test_a_slip_is_named_by_what_it_did(changed, words):
    slipped = [{name: changed.get(name, lambda x: x)(x) for name, x in one.items()} for one in GOT]
    assert named_slip(slipped, GOT) == words


@pytest.mark.parametrize("id", ["01.1", "02.1", "06.4", "08.3"])
def test_no_slip_of_an_exercise_passes(id):
    """`make kills` tries them for each exercise."""
    tried = try_slips(EXERCISES[id], 1)
    assert len(tried) > 3 * (id != "08.3") and all(as_it_must for as_it_must, _ in tried)
