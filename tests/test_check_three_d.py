"""Chapter 13's exercises: what they give is true, strange right answers pass, and nearly right ones do not."""

import copy
import re
import sys
from functools import partial
from importlib import import_module

import answers_three_d as answers
import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_repository import read

from lib import comm, run
from lib.check.catalogue import EXERCISES
from lib.check.judge import judge
from lib.check.three_d.choice import bill
from lib.check.three_d.whose_sum import CUT, REPLICATED, TIED
from lib.launch import HangError
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig, mean_loss
from lib.parallel import facts_of, parallelize
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.stage import stages_of
from lib.tensor_parallel.gpt import tensor_parallel

for module in (sys.modules[__name__], answers):
    cloudpickle.register_pickle_by_value(module)
PAGE = read("solutions/13_3d_parallelism.md")
EIGHT = {"dp": 2, "pp": 2, "tp": 2}


# ---- what is given --------------------------------------------------------------------------------------------------

NAMED = {
    "column weight": r"(qkv|up)\.weight",
    "column bias": r"(qkv|up)\.bias",
    "row weight": r"(out|down)\.weight",
    "row bias": r"(out|down)\.bias",
    "norm": r"norm\d?\.(weight|bias)",
    "positions": r"position\.weight",
    TIED: r"token\.weight",
}


def sums_of_facts(world, sizes, sequence_parallel):
    """Kind → the groups that this rank's parameters of that kind are summed over, as `lib.parallel` says."""
    mesh, schedule = Mesh(MeshShape(**sizes), world), one_f_one_b(sizes["pp"], 4)
    config = GPTConfig(vocab_size=12, context=12, d_model=12, num_layers=7, num_heads=6)
    model = tensor_parallel(GPT(config), mesh.group("tp"), sequence_parallel)
    facts = facts_of(stages_of(model, schedule, mesh.group("pp").rank), mesh, schedule.rank_of)
    kinds = {fact.name: [kind for kind, name in NAMED.items() if re.search(name, fact.name)] for fact in facts}
    assert all(len(found) == 1 for found in kinds.values()), kinds
    found = {}
    for fact in facts:
        found.setdefault(kinds[fact.name][0], set()).add(tuple(sorted(fact.sum_over.ranks)))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [EIGHT, {"pp": 3, "tp": 2, "dp": 2}], ids=str)
def test_the_ranks_to_sum_are_those_of_the_library(sizes, sequence_parallel):
    (exercise,) = (e for e in EXERCISES.values() if e.title == "ranks_to_sum")
    seen = set()
    for rank, kinds in enumerate(run(sums_of_facts, MeshShape(**sizes).size, sizes, sequence_parallel)):
        for kind, groups in kinds.items():
            case = (sizes, rank, kind, sequence_parallel)
            (text,) = exercise.reference([{"cases": [case]}])[0].values()
            assert {str(list(group)) for group in groups} == {text}, case
            seen.add(kind)
    assert seen == {*CUT, *REPLICATED, TIED}


STEP = """import torch

from lib import comm
from lib.mesh import Mesh, MeshShape


def total(x, group):
    return comm.all_reduce(x, group)


def step(world, skips=-1, astray=-1):
    mesh = Mesh(MeshShape(dp=2, pp=2, tp=2), world)
    norms, gradients = torch.ones(8), torch.ones(64)
    if world.rank != skips:
        total(norms, mesh.group("tp"))
    total(gradients, mesh.group("tp" if world.rank == astray else "dp"))
    total(gradients.square().sum(), world)
"""


@pytest.mark.parametrize(("report", "faults"), [(0, {"skips": 6}), (1, {"astray": 5})])
def test_the_reports_of_the_page_are_what_the_runtime_prints(report, faults, tmp_path, monkeypatch):
    (tmp_path / "step.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "step", raising=False)
    with pytest.raises(HangError) as hang:
        run(partial(import_module("step").step, **faults), 8)
    assert str(hang.value) == re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)[report]


def test_the_program_of_the_page_is_the_one_that_is_tried():
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    tried = read("tests/answers_three_d.py").partition("def wrong_step")[2].partition("\n\n\n")[0]
    body = re.compile(r'\A.*?""".*?"""\n', re.DOTALL)
    assert body.sub("", program).strip() == body.sub("", tried).strip()


FIGURES = {  # of the page's last solution
    "12.9 GB": {"dp": 4, "pp": 2, "microbatches": 16},
    "9.9 %": {"pp": 8, "microbatches": 64},
    "65.1 GB": {"dp": 2, "pp": 4, "microbatches": 32, "recompute": "none"},
    "86.7 GB": {"dp": 2, "pp": 4, "microbatches": 32, "recompute": "none"},
    "17.9 %": {"dp": 2, "pp": 8, "tp": 4, "microbatches": 32},
}


@pytest.mark.parametrize("figure", FIGURES)
def test_the_figures_of_the_page_are_those_of_the_bill(figure):
    assert figure in bill(Layout(**{"tp": 8, "zero": 1} | answers.SLIM | FIGURES[figure]))
    assert figure.replace(" %", "%") in PAGE


# ---- strange answers ------------------------------------------------------------------------------------------------


def groups(change):
    return lambda sizes, axes: change(answers.mesh_groups(sizes, axes))


def ranks(change):
    return lambda *case: change(answers.ranks_to_sum(*case))


def norm_as(change):
    return lambda *given: change(answers.clip_over_axes(*given))


def row_by_row(gradients, copies, max_norm, groups):
    square = torch.zeros(1, dtype=gradients[0].dtype)
    for x, count in zip(gradients, copies, strict=True):
        for row in x:
            square += row.dot(row) / count
    dist.all_reduce(square, group=dist.group.WORLD)
    for x in gradients:
        torch.mul(x, torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0), out=x)
    return square.sqrt()


def through_comm(gradients, copies, max_norm, groups):
    square = sum((x**2).sum() / count for x, count in zip(gradients, copies, strict=True))
    norm = comm.all_reduce(square, Group("world", tuple(range(8)), dist.get_rank())).sqrt()
    for x in gradients:
        x /= max(1.0, norm.item() / max_norm)
    return norm


def into_data(gradients, copies, max_norm, groups):
    norm = answers.clip_over_axes([x.clone() for x in gradients], copies, max_norm, groups)
    for x in gradients:
        x.data = x.data * min(1.0, max_norm / norm.item())
    return norm


def by_library(**fields):
    """A step of another layout on the same mesh."""

    def answer(world, model, inputs, targets, max_norm):
        layout = Layout(dp=2, pp=2, tp=2, **fields)
        make = partial(torch.optim.SGD, lr=0.1)
        ours = parallelize(model, Mesh(MeshShape(**layout.sizes), world), layout, make)
        return float(ours.step(inputs, targets, max_norm)), tuple(ours.facts)

    return answer


def serially(world, model, inputs, targets, max_norm):
    """One process on every rank, whose weights are cut after the step."""
    loss = mean_loss(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    mesh, schedule = Mesh(MeshShape(**EIGHT), world), one_f_one_b(2, 2)
    tensor_parallel(model, mesh.group("tp"))
    return loss, facts_of(stages_of(model, schedule, mesh.group("pp").rank), mesh, schedule.rank_of)


SLIM = answers.SLIM
STRANGE = {
    "13.1": [
        groups(lambda found: found[::-1]),
        groups(lambda found: [tuple(one) for one in found]),
        groups(lambda found: {frozenset(one) for one in found}),
        groups(lambda found: tuple(map(np.array, found))),
        groups(lambda found: [torch.tensor(one) for one in found]),
        groups(np.array),
        groups(lambda found: torch.tensor(found, dtype=torch.int32)),
        groups(lambda found: (iter(one) for one in found)),
        groups(lambda found: {one[0]: one for one in found}.values()),
        groups(lambda found: [dict.fromkeys(one) for one in found]),
    ],
    "13.2": [
        ranks(set),
        ranks(frozenset),
        ranks(tuple),
        ranks(lambda found: found[::-1]),
        ranks(np.array),
        ranks(torch.tensor),
        ranks(iter),
        ranks(lambda found: [np.int32(rank) for rank in found]),
        ranks(lambda found: [torch.tensor(rank) for rank in found]),
        ranks(dict.fromkeys),
    ],
    "13.3": [
        row_by_row,
        through_comm,
        into_data,
        norm_as(float),
        norm_as(lambda norm: norm.numpy()),
        norm_as(np.float64),
        norm_as(lambda norm: norm.requires_grad_()),
        norm_as(lambda norm: norm[None]),
        lambda gradients, *rest: answers.clip_over_axes(tuple(gradients), *rest),
        lambda gradients, copies, *rest: answers.clip_over_axes(gradients, torch.tensor(copies), *rest),
    ],
    "13.4": [
        serially,
        by_library(zero=1, sequence_parallel=True),
        by_library(zero=2, microbatches=4),
        by_library(schedule="zb-h1", microbatches=4, sequence_parallel=True),
        by_library(microbatches=4),
        by_library(recompute="full", sequence_parallel=True),
        by_library(recompute="selective", schedule="gpipe"),
        by_library(schedule="naive"),
        lambda *given: list(answers.step_on_eight(*given)),
        lambda *given: [np.float64(x) if torch.is_tensor(x) else x[::-1] for x in answers.step_on_eight(*given)],
    ],
    "13.5": [
        lambda: [(6.0, "tp"), (5, "Dp")],
        lambda: np.array([[6, "tp"], [5, "dp"]], dtype=object).tolist(),
        lambda: ((True + 5, "tp"), (np.int8(5), "dp")),
    ],
    "13.6": [
        answers.choosing(pp=8, tp=8, microbatches=64, recompute="selective"),
        answers.choosing(dp=2, pp=4, tp=8, microbatches=32, zero=0, **SLIM),
        answers.choosing(dp=2, pp=4, tp=8, microbatches=32, zero=1, recompute="selective"),
        answers.choosing(dp=2, pp=4, tp=8, order="pp,dp,tp", microbatches=32, zero=1, **SLIM),
        answers.choosing(pp=16, tp=4, microbatches=64, schedule="interleaved", stages_per_rank=5, **SLIM),
    ],
}


@pytest.mark.parametrize("exercise_id", STRANGE)
def test_strange_right_answers_pass(exercise_id):
    seen = judge(EXERCISES[exercise_id], STRANGE[exercise_id], seed=11)
    assert [(i, case) for i, cases in enumerate(seen) for case in cases if case.status != "PASS"] == []


def scales_all_but_the_last(gradients, *rest):
    kept = gradients[-1].clone()
    norm = answers.clip_over_axes(gradients, *rest)
    gradients[-1].copy_(kept)
    return norm


def all_along_tp(fact, mesh):
    return fact.sum_over if fact.crosses else mesh.group("dp", "tp")


def without_its_facts(drop):
    def answer(*given):
        loss, facts = answers.step_on_eight(*given)
        return loss, [fact for fact in facts if not drop(fact)]

    return answer


def does_not_step(world, model, inputs, targets, max_norm):
    loss, facts = serially(world, copy.deepcopy(model), inputs, targets, max_norm)
    mesh, schedule = Mesh(MeshShape(**EIGHT), world), one_f_one_b(2, 2)
    tensor_parallel(model, mesh.group("tp"))
    return loss, facts_of(stages_of(model, schedule, mesh.group("pp").rank), mesh, schedule.rank_of)


NEARLY = {  # with a word of the verdict
    "13.1": [
        (lambda *case: None, "NoneType"),
        (lambda *case: 3, "int"),
        (groups(lambda found: [*found, found[0]]), "is not right"),
        (groups(lambda found: found[:-1]), "is not right"),
        (groups(lambda found: [[*one, one[-1]] for one in found]), "is not right"),
        (groups(lambda found: [list(map(float, one)) for one in found]), "is not right"),
        (groups(lambda found: [rank for one in found for rank in one]), "is not right"),
        (groups(lambda found: [one[-1:] + one[:-1] for one in found]), "do not ascend"),
        (lambda sizes, axes: answers.mesh_groups(sizes, sorted(axes)[:2]) if len(sizes) < 4 else [], "is not right"),
    ],
    "13.2": [
        (lambda *case: None, "NoneType"),
        (ranks(len), "int"),
        (ranks(lambda found: [*found, found[0]]), "is not right"),
        (ranks(lambda found: found[1:]), "is not right"),
        (ranks(str), "is not right"),
        (
            lambda sizes, rank, kind, slices: [
                r for r in answers.ranks_to_sum(sizes, rank, kind, slices) if r != rank
            ],
            "",
        ),
        (lambda sizes, rank, kind, slices: answers.ranks_to_sum(sizes, rank, kind, True), "t times too large"),
        (lambda sizes, rank, kind, slices: answers.ranks_to_sum(sizes, rank, kind, False), "partial gradient"),
    ],
    "13.3": [
        (norm_as(lambda norm: None), "is a `return` missing?"),
        (norm_as(lambda norm: norm * (1 + 1e-4)), "the norm is not right"),
        (scales_all_but_the_last, "the gradients"),
        (answers.clipping(factor=lambda norm, max_norm: min(1, max_norm / norm.item()) * 0.999), "the gradients"),
        (answers.clipping(factor=lambda norm, max_norm: max_norm / (norm.item() + max_norm)), "the gradients"),
        (answers.clipping(square=lambda x, c: x.abs().sum() / c), "the norm is not right"),
        (lambda gradients, *rest: answers.clip_over_axes(gradients[::-1], *rest), "the norm is not right"),
        (answers.clipping(total=lambda mine, groups: dist.all_reduce(mine, op=dist.ReduceOp.MAX)), "is not right"),
    ],
    "13.4": [
        (lambda *given: (answers.step_on_eight(*given)[0], []), "what was returned"),
        (answers.stepping(over=all_along_tp), "is not right"),
        (answers.stepping(count_of=answers.local_count, over=answers.dp_for(tied=True)), "copies of norms agree"),
        (answers.stepping(count_of=lambda mine, whole: (mine != -100).sum()), "the loss is not right"),
        (without_its_facts(lambda fact: "norm1" in fact.name), "after the step is not right"),
        (does_not_step, "after the step"),
    ],
    "13.5": [
        (lambda: None, "what was returned"),
        (lambda: (("tp", 6), ("dp", 5)), "the rank is not right"),
        (lambda: ((5, "dp"), (6, "tp")), "First report"),
        (lambda: ((6, "tensor"), (5, "dp")), "the axis is not right"),
        (lambda: ((6,), (5,)), "is not right"),
    ],
    "13.6": [
        (lambda: Layout, "did not return a Layout"),
        (lambda: str(answers.choose_layout()), "did not return a Layout"),
        (lambda: Layout(dp=2, pp=4, tp=8, zero=3), "zero=3 and pp=4"),
        (answers.choosing(dp=2, pp=4, tp=8, microbatches=48, zero=1, **SLIM), "64 sequences cannot"),
        (answers.choosing(dp=1, pp=8, tp=8, microbatches=4, schedule="interleaved", stages_per_rank=2, **SLIM), "m"),
        (answers.choosing(dp=2, pp=4, tp=8, order="tp,pp,dp", microbatches=32, zero=1, **SLIM), "✗ a tp group"),
        (answers.choosing(dp=64, zero=3, recompute="full"), "gradients are sent between nodes"),
    ],
}


@pytest.mark.parametrize("exercise_id", NEARLY)
def test_nearly_right_answers_do_not_pass(exercise_id):
    seen = judge(EXERCISES[exercise_id], [answer for answer, _ in NEARLY[exercise_id]], seed=11)
    for i, (cases, (_, words)) in enumerate(zip(seen, NEARLY[exercise_id], strict=True)):
        assert cases[-1].status == "FAIL" and words in " ".join(cases[-1].hint.split()), (i, cases)
