"""Chapter 4: the table of exercise 6 is what its program does, and each of its runs has one explanation."""

import re
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss, pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course.exercises.ch04.e04_6_find_changes import EXERCISE
from lib import comm
from lib.launch import run

PAGE = (Path(__file__).parents[2] / "solutions" / "04_zero.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"```python\n(def train\(.*?)```", PAGE, re.DOTALL)
(TABLE,) = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
SIZES = {"up.weight": 24, "up.bias": 6, "down.weight": 18, "down.bias": 3}
LOOP = "    for batch in batches:\n"
ZEROS = "master.grad = torch.zeros_like(master)\n"
(OPTIMIZER,) = re.findall(r"    (optimizer = .*\n)", PROGRAM)
(GATHER,) = re.findall(r"    (flat = comm.all_gather.*\n)", PROGRAM)
STEP = "optimizer.step()\n"
IN_LOOP = 8 * " "
CHANGES = {  # what stands in the program, and what stands there instead
    "a": (LOOP + IN_LOOP + ZEROS, 4 * " " + ZEROS + LOOP),
    "b": (4 * " " + OPTIMIZER + LOOP, LOOP + IN_LOOP + OPTIMIZER),
    "c": (" / len(batch)", ""),
    "d": ("model.zero_grad()\n", "pass\n"),
    "e": ("0.5 / norm", "0.5 / own.sqrt()"),
    "f": (STEP + IN_LOOP + GATHER, GATHER + IN_LOOP + STEP),
    "g": ("vector_to_parameters(flat, params)\n", "pass\n"),
    "h": ("", ""),
}


def program(change):
    before, after = CHANGES.get(change, ("", ""))
    assert not before or PROGRAM.count(before) == 1, change
    return PROGRAM.replace(before, after) if before else PROGRAM


class Heard:
    """`comm`, and the norms of the gradients that go into it and of the sum that comes out."""

    def __init__(self):
        self.gradients, self.norms = [], []

    def __getattr__(self, name):
        return getattr(comm, name)

    def reduce_scatter(self, gradient, *args, **options):
        self.gradients.append(gradient.norm().item())
        return comm.reduce_scatter(gradient, *args, **options)

    def all_reduce(self, own, *args, **options):
        squares = comm.all_reduce(own, *args, **options)
        self.norms.append(squares.sqrt().item())
        return squares


def padded(x, n):
    return pad(x, (0, -len(x) % n))


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [(random(5, 4), 3 * random(5, 3)) for _ in range(2)]


def two_steps(world, change, at):
    """Norms of this rank's gradients, norms of the mean, and weights at the start and after each step."""
    here, heard = world.rank == at, Heard()
    torch.manual_seed(0)
    layers = OrderedDict(up=nn.Linear(4, 6), tanh=nn.Tanh(), down=nn.Linear(6, 3))
    model = nn.Sequential(layers).double()
    names = {"torch": torch, "nn": nn, "comm": heard}
    names |= {f.__name__: f for f in (mse_loss, padded, parameters_to_vector, vector_to_parameters)}
    exec(program(change if here else ""), names)
    seen = []

    def note():
        seen.append(parameters_to_vector(model.parameters()).detach().clone())

    def batches():
        for step in (1, 2):
            note()
            yield batch_of((world.rank + (here and change == "h")) % world.size, step)

    names["train"](world, model, batches())
    note()
    return heard.gradients, heard.norms, seen


def all_runs(world):
    return {(at, change): two_steps(world, change, at) for change in ["", *CHANGES] for at in range(world.size)}


def lines(name, ranks, right):
    """Two lines of the table."""
    for k in (0, 1):
        gradients = "   ".join(" ".join(f"{x:.2f}" for x in norms[2 * k : 2 * k + 2]) for norms, _, _ in ranks)
        _, norms, seen = ranks[0]
        changed = (seen[k + 1] != seen[k]).sum()
        wrong = (seen[k + 1] - right[0][2][k + 1]).abs() > 1e-9
        parts = {p: int(x.sum()) for p, x in zip(SIZES, wrong.split([*SIZES.values()]), strict=True)}
        differ = ", ".join(f"{p} {count}" for p, count in parts.items() if count) or "none"
        differ = "all 51" if wrong.all() else differ
        yield f"{name:<6} {k + 1}   {gradients}   {norms[k]:.3f}  {changed:>3}      {differ}"


def test_the_table_is_what_the_program_does_and_each_run_has_one_explanation():
    by_rank = run(all_runs, 4)
    runs = {case: [rank[case] for rank in by_rank] for case in by_rank[0]}
    right = runs[0, ""]

    def equal(ranks):
        return all(torch.equal(a, b) for *_, seen in ranks for a, b in zip(seen, ranks[0][2], strict=True))

    changed = {case: [*lines("", ranks, right), equal(ranks)] for case, ranks in runs.items() if case[1]}
    tables = {"": TABLE} | {
        one.row: one.task.split("```text\n")[1].removesuffix("\n```") for one in EXERCISE.variants
    }
    for row, table in tables.items():
        cases = dict(zip("ABC", map(tuple, EXERCISE.rows[row].right[0]()), strict=True))
        said = [
            *lines("right", right, right),
            *(x for name, case in cases.items() for x in lines(name, runs[case], right)),
        ]
        assert table.splitlines()[2:] == said, "\n".join(said)
        assert all(equal(runs[case]) for case in cases.values())
        for case in cases.values():
            assert [other for other, said in changed.items() if said == changed[case]] == [case]
