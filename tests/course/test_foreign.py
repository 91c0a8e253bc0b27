"""The wrong programs of plain PyTorch that chapter 15 shows: their pages, and the verdicts on them as they are."""

import nbformat
import pytest

from course.check.catalogue import EXERCISES
from course.practise.foreign import page_of_program
from tests.book.test_repository import ROOT
from tests.course.answers import assert_told, edited

PATH = ROOT / "exercises" / "15_when_it_goes_wrong.ipynb"
SHOWN = {  # exercise → name of its program, the data of its page, and words of the page and of the verdict
    "15.17": ("wrong_ddp", {"padded": True}, "differs is the loss", "That is still the mean of the ranks' means"),
    "15.18": ("wrong_tp", {}, "along tp, in 6 of the 9 tensors", "The norms still have a different gradient"),
    "15.19": ("wrong_fsdp", {"max_norm": 1.0}, "(the number of microbatches)", "Both mistakes are still in it"),
}


def program(name):
    """A program as the notebook defines it, with the notebook's imports."""
    cells = [cell.source for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    names = {"__name__": "__main__"}
    for cell in cells:
        if "import fully_shard" in cell or cell.startswith("import torch\n"):
            exec(cell, names)
        elif f"def {name}(" in cell:
            exec(cell.partition("\n\n\nprint(")[0], names)
    return names[name]


@pytest.mark.parametrize("exercise_id", SHOWN)
def test_the_shown_program_has_the_mistake_and_the_solution_is_the_same_training(exercise_id):
    name, data, of_page, of_verdict = SHOWN[exercise_id]
    wrong = program(name)
    assert of_page in " ".join(page_of_program(wrong, **data).split())
    assert_told(exercise_id, wrong, of_verdict)
    right = page_of_program(EXERCISES[exercise_id].right[0], **data)
    assert "the same training: no link that was compared differs" in right


def test_the_page_goes_on_to_the_second_mistake():
    half = edited("dist.all_reduce(square) =>", EXERCISES["15.19"].right[0])
    page = page_of_program(half, max_norm=1.0)
    assert "each takes the norm of its shards" in " ".join(page.split())
