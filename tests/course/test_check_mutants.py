"""Mutants: the slips of the engine in the text of a solution; each must fail, or is listed with its reason."""

from dataclasses import replace

import pytest

from course.check import find
from course.check.catalogue import EXERCISES
from course.check.edits import Edited, read_mistakes
from course.check.mutants import mutants, written
from course.check.tried import try_mutants

TEXT = """
def step(params, group, dist, comm):
    total = sum(p.norm() for p in params)
    for p in params:
        p.grad = comm.all_reduce(p.grad, group, op="mean")
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
    (total / group.size).backward()
    return total, 30 * total
"""
PROGRAM = Edited("course.check.edits", TEXT, "step")


def lines():
    return {written(one, PROGRAM): what for what, one in mutants(PROGRAM)}


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        ('p.grad, group, op="mean") => p.grad = comm.all_reduce(p.grad, group, op="sum")', "a sum for a mean"),
        ('=> p.grad = (100 * (comm.all_reduce(p.grad, group, op="mean")))', "100 times"),
        ("dist.all_reduce(p.data) => dist.all_reduce((p.data).mul_(2))", "2 times"),
        ("dist.all_reduce(p.data) => dist.all_reduce((p.data).div_(dist.get_world_size()))", "a mean for a sum"),
        ("p.data /= dist.get_world_size() => p.data /= 1", "a sum for a mean"),
        ("=> for p in [*(params)][1:]:", "the first forgotten"),
        ("=> for p in [*(params)][:-1]:", "the last forgotten"),
        ("=> total = (lambda xs: sum(xs) / len(xs))([*(", "a mean for a sum"),
        ("=> ((2 * (total / group.size))).backward()", "2 times"),
        ("=> ((total)).backward()", "a sum for a mean"),
        ("=> return (2 * (total)), 30 * total", "2 times"),
        ("=> return total, (100 * (30 * total))", "100 times"),
        ("=> return total, 27 * total", "a number too small"),
        ("lambda params, group, dist, comm: step(params[:-1], group, dist, comm)", "the last of params forgotten"),
    ],
)
def test_each_kind_of_slip_is_put_into_the_text(edit, what):
    assert [kind for line, kind in lines().items() if edit in line] == [what]


def test_a_mutant_is_written_as_a_list_has_it():
    one = next(m for _, m in mutants(find("03.2").solution) if "op=" in m.text)
    (read,) = read_mistakes(f"{written(one, find('03.2').solution)}\n    A reason.", find("03.2").right[0])
    assert read.wrong == one


@pytest.mark.parametrize("id", ["01.4", "03.1", "03.7", "06.1"])
def test_a_slip_that_once_passed_fails(id):
    """The factor 30 for 34, the last parameter, a factor under AdamW, a mean before a norm."""
    tried = try_mutants(EXERCISES[id], 1)
    assert len(tried) > 10 and [text for as_it_must, text in tried if not as_it_must] == []


def test_a_mutant_that_passes_is_printed_as_a_list_has_it():
    exercise = find("03.1")
    faults = [text for as_it_must, text in try_mutants(replace(exercise, equivalent=()), 1) if not as_it_must]
    assert len(faults) == len(exercise.equivalent) and all("=> num_ranks = " in text for text in faults)
    gone = replace(exercise.equivalent[0], wrong=replace(exercise.equivalent[0].wrong, text="def f(): pass"))
    (unknown,) = [text for ok, text in try_mutants(replace(exercise, equivalent=(gone,)), 1) if "no mutant" in text]
    assert unknown == "listed as equivalent, and no mutant: The count is only compared with 0."


def test_a_table_has_no_program_to_change():
    assert try_mutants(find("08.3"), 1) == try_mutants(find("07.5"), 1) == []
