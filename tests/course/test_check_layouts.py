"""Exercises of chapters 13 and 14: what is given is true, strange right answers pass, nearly right ones do not."""

import copy
import random
import re
import sys
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from book.published import RUNS
from book.published.rows import predict, read_rows
from course.check.bill import bill
from course.check.catalogue import EXERCISES
from course.check.edits import Edited
from course.check.exercise import ALL
from course.check.judge import judge
from course.check.refusals import BROKEN, KEPT, MODEL_STATES, NOTHING_BINDS, ROUNDS, binds, broken_layouts
from course.exercises.ch13 import e13_1_mesh_groups as e131
from course.exercises.ch13 import e13_2_ranks_to_sum as e132
from course.exercises.ch13 import e13_3_clip_over_axes as e133
from course.exercises.ch13 import e13_4_step_on_eight as e134
from course.exercises.ch13 import e13_6_choose_layout as e136
from course.exercises.ch14 import e14_1_uneven_step as e141
from course.exercises.ch14 import e14_2_fullest_ranks as e142
from course.exercises.ch14 import e14_3_repairs as e143
from course.exercises.ch14 import e14_4_wrong_term as e144
from course.exercises.ch14 import e14_5_calibrate as e145
from course.exercises.ch14 import e14_6_least_regret as e146
from lib import comm, run
from lib.cost.sizes import Recipe
from lib.launch import HangError
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig, mean_loss
from lib.parallel import facts_of, parallelize
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import Costs, simulate
from lib.pipeline.stage import stages_of
from lib.planner import memory_bytes, step_s
from lib.planner.training import stack_for
from lib.tensor_parallel.gpt import tensor_parallel
from tests.book.test_repository import read
from tests.course.answers import edited

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PAGE_13, PAGE_14 = read("solutions/13_3d_parallelism.md"), read("solutions/14_choosing.md")
EIGHT = {"dp": 2, "pp": 2, "tp": 2}


# ---- what is given --------------------------------------------------------------------------------------------------

NAMED = {
    "column weight": r"(qkv|up)\.weight",
    "column bias": r"(qkv|up)\.bias",
    "row weight": r"(out|down)\.weight",
    "row bias": r"(out|down)\.bias",
    "norm": r"norm\d?\.(weight|bias)",
    "positions": r"position\.weight",
    e132.TIED: r"token\.weight",
}


def sums_of_facts(world, sizes, sequence_parallel):
    """Kind → the groups that this rank's parameters of that kind are summed over, as `lib.parallel` says."""
    mesh, schedule = Mesh(MeshShape(**sizes), world), one_f_one_b(sizes["pp"], 4)
    config = GPTConfig(vocab_size=12, context=12, d_model=12, num_layers=7, num_heads=6)
    model = tensor_parallel(GPT(config), mesh.group("tp"), sequence_parallel)
    found = {}
    for fact in facts_of(stages_of(model, schedule, mesh.group("pp").rank), mesh, schedule.rank_of):
        (kind,) = (kind for kind, name in NAMED.items() if re.search(name, fact.name))
        found.setdefault(kind, set()).add(tuple(sorted(fact.sum_over.ranks)))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [EIGHT, {"pp": 3, "tp": 2, "dp": 2}], ids=str)
def test_the_ranks_to_sum_are_those_of_the_library(sizes, sequence_parallel):
    seen = set()
    for rank, kinds in enumerate(run(sums_of_facts, MeshShape(**sizes).size, sizes, sequence_parallel)):
        for kind, groups in kinds.items():
            wanted = e132.ranks_to_sum(sizes, rank, kind, sequence_parallel)
            assert groups == {tuple(sorted(wanted))}, (sizes, rank, kind)
            seen.add(kind)
    assert seen == {*e132.CUT, *e132.REPLICATED, e132.TIED}


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


REPORTS = {"": PAGE_13} | {one.row: one.task for one in EXERCISES["13.5"].variants}


@pytest.mark.parametrize(("row", "report"), [*product(REPORTS, (0, 1))])
def test_the_reports_of_the_task_are_what_the_runtime_prints(row, report, tmp_path, monkeypatch):
    at_fault, _ = EXERCISES["13.5"].rows[row].right[0]()[report]
    (tmp_path / "step.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "step", raising=False)
    with pytest.raises(HangError) as hang:
        run(partial(import_module("step").step, **{("skips", "astray")[report]: at_fault}), 8)
    said = re.sub(r"for \d\.\d s", "for 2.0 s", str(hang.value))  # a look at the ranks may come a little later
    assert said == re.findall(r"```text\n(.*?)\n```", REPORTS[row], re.DOTALL)[report]


@pytest.mark.thorough("eight ranks")
@pytest.mark.parametrize("row", EXERCISES["13.4"].rows)
def test_the_program_of_the_task_has_both_mistakes(row):
    exercise = EXERCISES["13.4"].rows[row]
    names, imports = {}, re.findall(r"(?m)^(?:import|from) .*$", PAGE_13)
    for text in imports + re.findall(r"```python\n(.*?)```", exercise.task or PAGE_13, re.DOTALL):
        exec(text, names)
    ((verdict,),) = judge(exercise, [names["wrong_step"]], seed=5)
    assert " ".join(verdict.hint.split()) == "Both mistakes are still in it."


FIGURES = {  # of the last solution of the page
    "12.9 GB": e136.RULED_OUT[2],
    "9.9 %": e136.EXERCISE.right[1]()[0],
    "65.1 GB": e136.RULED_OUT[0],
    "86.7 GB": e136.RULED_OUT[0],
    "17.9 %": e136.RULED_OUT[1],
}


@pytest.mark.parametrize("figure", FIGURES)
def test_the_figures_of_the_page_are_those_of_the_bill(figure):
    assert figure in bill(FIGURES[figure]) and figure.replace(" %", "%") in PAGE_13


def test_an_uneven_step_is_the_simulators():
    rng = random.Random(2)
    for _ in range(50):
        p, m, block_s, message_s = rng.randint(1, 6), rng.randint(1, 20), 0.5, 0.25
        blocks = [rng.randint(1, 6) for _ in range(p)]
        head_s = block_s * (max(blocks) - blocks[-1]) + rng.random()
        stages = [n * block_s + (2 * message_s if p > 1 else 0) for n in blocks]
        stages[-1] += head_s
        third = [s / 3 for s in stages]
        found = simulate(one_f_one_b(p, m), Costs(F=third, I=third, W=third)).makespan
        assert e141.uneven_step(blocks, block_s, head_s, message_s, m, 0, 0) == pytest.approx(found)


def table_of(page, heading):
    """The rows of the first table below a heading, without its head."""
    lines = re.search(r"(?:^\|.*\n)+", page.partition(heading)[2], re.MULTILINE)[0].splitlines()[2:]
    return [[field.strip() for field in line.strip("|").split("|")] for line in lines]


def test_the_tables_of_the_pages_are_what_is_judged():
    ruled_out = [[*map(str, (x.dp, x.pp, x.tp, x.microbatches))] for x in e136.RULED_OUT]
    assert [row[1:5] for row in table_of(PAGE_13, "## 6. ")] == ruled_out
    for name, *fields in table_of(PAGE_14, "## 2. "):
        x, sequences = e142.LAYOUTS[name]
        assert fields == [*map(str, (x.tp, x.pp, x.dp, x.rows, x.stages_per_rank, x.zero, x.recompute, sequences))]
    broken = [[*map(str, (x.tp, x.pp, x.dp, x.rows, x.zero, t.global_batch))] for t, x in broken_layouts()]
    assert [row[2:] for row in table_of(PAGE_14, "## 3. ")] == broken
    assert [row[0].strip("`") for row in table_of(PAGE_14, "## 4. ")] == [*e144.FACTORS][:-1]


def test_the_bytes_that_the_page_states_are_the_stacks():
    stack = stack_for("megatron-lm", "h100")
    assert stack.recipe == Recipe(2, 4, 4, 8) and stack.logits_bytes == 14 and stack.spare_activations == 1
    more = 3 * 16 * 2 * 4096 * 2 * 8192 / 4 / 1e9
    assert f"{more:.1f} GB for three more" in PAGE_14 and f"that is {more:.1f} GB more" in e142.MISTAKES
    assert f"the logits dominate: {e142.fullest_ranks()[2][3]:.1f} GB" in PAGE_14


def loaded(program):
    return program.load() if isinstance(program, Edited) else program


@pytest.mark.parametrize(
    "exercise",
    [*e136.EXERCISE.rows.values(), *e142.EXERCISE.rows.values()],
    ids=lambda e: f"{e.id} {e.row}".strip(),
)
def test_no_two_numbers_that_are_known_are_near_each_other(exercise):
    """What is recognised although it is rounded; a mistake in several numbers is recognised by all of them."""
    wrong = [
        exercise.right[0](),
        *(loaded(m.wrong)() for m in exercise.mistakes if len(m.about) == 1 and m.about != ALL),
    ]
    tables = [[row] if exercise.id == e136.EXERCISE.id else row for row in wrong if isinstance(row, (list, tuple))]
    for i, row in enumerate(tables[0]):
        for j in range(1, len(row)):
            numbers = sorted({round(table[i][j], 9) for table in tables} - {0})
            assert all(b > 1.02 * a for a, b in zip(numbers, numbers[1:], strict=False)), (i, j, numbers)


def test_each_layout_is_refused_for_a_different_reason():
    for row, exercise in e143.EXERCISE.rows.items():
        assert [binds(*pair)[0] for pair in broken_layouts(row)] == [word for word, _ in exercise.right[0]()]
    training, layout = broken_layouts()[0]
    assert binds(training, layout._replace(tp=4, dp=8))[0] == NOTHING_BINDS
    assert binds(training, layout._replace(tp=4, pp=4, dp=4, stages_per_rank=3, rows=4))[0] == NOTHING_BINDS
    assert binds(training, layout._replace(tp=1, pp=4, dp=16, stages_per_rank=3, rows=16))[0] == ROUNDS


def slower(number, **change):
    """How much slower a layout so changed is than the best single change."""
    training, layout = broken_layouts()[number - 1]
    new = e143.followed(layout._replace(**change))
    assert binds(training, new)[0] == NOTHING_BINDS
    return step_s(training, new).total / e143.fastest_s(number - 1) - 1


def test_no_repair_is_near_a_limit():
    """Neither of the 3 % that it may cost, nor of the memory that there is."""
    for row, i in product(BROKEN, range(6)):
        training, layout = broken_layouts(row)[i]
        for one in e143.singles(layout):
            word = binds(training, one)[0]
            if word in (NOTHING_BINDS, MODEL_STATES, KEPT):
                assert abs(memory_bytes(training, one).total / training.room_bytes - 1) > 0.03, one
            if word == NOTHING_BINDS:
                assert abs(step_s(training, one).total / e143.fastest_s(i, row) - 1 - e143.SLOWER) > 0.005, one


def test_costs_of_repairs_are_those_of_the_page():
    assert f"({slower(1, tp=4):.0%} in layout 1, {slower(4, tp=8):.0%} from tp = 4 to tp = 8 in layout 4)" in PAGE_14
    assert max(slower(5, zero=1), slower(5, pp=4)) < 0.01 and "differ by less than 1%" in PAGE_14
    assert f"costs {slower(6, recompute='full'):.0%} more than b = 1" in PAGE_14
    training, layout = broken_layouts()[5]
    two = layout._replace(rows=2)
    assert f"b = 2 does not fit, by {memory_bytes(training, two).total / 1e9 - 80:.0f} GB" in PAGE_14
    further = [memory_bytes(training, e143.followed(layout._replace(pp=pp))).activations for pp in (8, 16)]
    assert further[0] == pytest.approx(further[1]) and binds(training, two)[0] == KEPT


def test_the_runs_of_the_wrong_formulas_are_met_as_the_page_says():
    off = [abs(error) for error in e144.errors(e144.published(), "nothing")]
    assert len(off) == 45 and median(off) < 0.02 and max(off) > 0.1
    rows = {row["id"]: row for row in read_rows(RUNS)}
    for row in e144.published():
        assert sum(row["seconds"].values()) == pytest.approx(predict(rows[row["id"]]).seconds.total)


def test_a_step_is_linear_in_what_is_calibrated():
    rows = [(run, e145.parts_of(run)) for run in (*e145.SHOWN, *e145.KEPT_BACK)]
    assert all((row["tp"] > 0) == (run.layout.tp > 1) for run, row in rows)
    seconds = [e145.predicted(row, *constants) for _, row in rows for constants in ((0.85, 0.3), (0.45, 0.9))]
    assert 2 < min(seconds) and max(seconds) < 300


def test_regrets_are_those_of_the_page():
    both = [e146.either_way(cluster) for cluster in (*e146.CLUSTERS, e146.MEANS_DIFFER)]
    found = [e146.regrets(trainings) for trainings in both]
    losses = [judged.of[judged.bests[0]][1] for judged in found]
    assert f"loses {100 * min(losses):.0f} to {max(losses):.0%} in the second" in PAGE_14
    least = [judged.least for judged in found]
    assert f"loses {100 * min(least):.0f} to {max(least):.0%}. Without" in PAGE_14
    for trainings, judged in zip(both, found, strict=True):
        assert all(max(judged.of[best]) > judged.least + 0.04 for best in judged.bests)
        lost = sorted(e146.lost(trainings).values())
        assert lost[-1] - lost[-2] > 0.05 * step_s(trainings[1], judged.bests[1]).total
    reasons = [max(e146.lost(trainings), key=e146.lost(trainings).get) for trainings in both]
    assert {*reasons} == {"dp", "pp", "tp", "bubble"}
    # In one of the six, messages between stages are both: most of the time, and most of the loss.
    assert sum(r == e146.largest(t) for r, t in zip(reasons, both, strict=True)) <= 1
    means = found[-1].of
    assert max(means[min(means, key=lambda one: sum(means[one]))]) > found[-1].least + 0.02


@pytest.mark.thorough("many inputs")
@pytest.mark.parametrize("exercise", [e141.EXERCISE, e144.EXERCISE, e145.EXERCISE], ids=lambda e: e.id)
def test_right_answers_pass_on_many_inputs(exercise):
    """Without ranks: what is drawn always has its answer."""
    for seed in range(25):
        (given,) = exercise.inputs(torch.Generator().manual_seed(seed), 1)
        wanted, *others = [exercise.body(loaded(answer), None, given) for answer in exercise.right]
        (wanted,) = exercise.reference([given]) if exercise.reference else (wanted,)
        for found in others:
            assert all(found[name] == pytest.approx(value) for name, value in wanted.items()), (seed, found)


# ---- strange answers ------------------------------------------------------------------------------------------------


def as_(right, change):
    """An answer, changed."""
    return lambda *given: change(right(*given))


groups, ranks, norm = (partial(as_, f) for f in (e131.mesh_groups, e132.ranks_to_sum, e133.clip_over_axes))
stepped = partial(as_, e134.step_on_eight)
seconds, table, pairs = (partial(as_, f) for f in (e141.uneven_step, e142.fullest_ranks, e143.repairs))
term, constants, choice = (partial(as_, f) for f in (e144.wrong_term, e145.calibrate, e146.least_regret))
layout = partial(as_, e136.choose_layout)


def repairs_but(edit):
    return edited(edit, e143.repairs)


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


def into_data(gradients, *rest):
    before = [x.clone() for x in gradients]
    norm = e133.clip_over_axes(before, *rest)
    for x, clipped in zip(gradients, before, strict=True):
        x.data = clipped
    return norm


def by_library(**fields):
    """A step of another layout on the same mesh."""

    def answer(world, model, inputs, targets, max_norm):
        layout = Layout(**EIGHT, **fields)
        ours = parallelize(model, Mesh(MeshShape(**layout.sizes), world), layout, e134.make_sgd)
        return float(ours.step(inputs, targets, max_norm)), tuple(ours.facts)

    return answer


def serially(world, model, inputs, targets, max_norm):
    """One process on every rank, whose weights are cut after the step."""
    loss = mean_loss(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    e134.make_sgd(model.parameters()).step()
    return loss, cut(world, model)


def cut(world, model):
    mesh, schedule = Mesh(MeshShape(**EIGHT), world), one_f_one_b(2, 2)
    tensor_parallel(model, mesh.group("tp"))
    return facts_of(stages_of(model, schedule, mesh.group("pp").rank), mesh, schedule.rank_of)


SLIM = e136.SLIM
STRANGE = {
    "13.1": [
        groups(lambda found: found[::-1]),
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
        *map(ranks, (frozenset, tuple, np.array, torch.tensor, iter, dict.fromkeys)),
        ranks(lambda found: [np.int32(rank) for rank in found]),
        ranks(lambda found: [torch.tensor(rank) for rank in found]),
    ],
    "13.3": [
        *(row_by_row, into_data),
        *map(norm, (np.float64, float, lambda x: torch.tensor([x], requires_grad=True))),
        lambda gradients, *rest: e133.clip_over_axes(tuple(gradients), *rest),
        lambda gradients, copies, *rest: e133.clip_over_axes(gradients, torch.tensor(copies), *rest),
    ],
    "13.4": [
        serially,
        by_library(zero=1, sequence_parallel=True),
        by_library(zero=2, microbatches=4),
        by_library(schedule="zb-h1", microbatches=4, sequence_parallel=True),
        by_library(recompute="full", sequence_parallel=True),
        by_library(recompute="selective", schedule="gpipe"),
        by_library(schedule="naive"),
        stepped(list),
        stepped(lambda pair: [np.float64(pair[0]), pair[1][::-1]]),
    ],
    "13.5": [
        lambda: np.array([[6, "tp"], [5, "dp"]], dtype=object).tolist(),
        lambda: ((True + 5, " tp"), (np.int8(5), "DP")),
    ],
    "13.6": [
        *map(layout, (list, lambda found: (found[0], *map(np.float32, found[1:])))),
        layout(lambda found: (found[0], *map(torch.tensor, found[1:]))),
        layout(lambda found: (found[0], 87, 0.18, 13.0)),
        e136.but(Layout(pp=8, tp=8, microbatches=64, recompute="selective")),
        e136.but(Layout(2, 4, 8, microbatches=32, **SLIM)),
        e136.but(Layout(2, 4, 8, order="pp,dp,tp", microbatches=32, zero=1, **SLIM)),
        e136.but(Layout(1, 16, 4, microbatches=64, schedule="interleaved", stages_per_rank=5, **SLIM)),
    ],
    "14.1": [*map(seconds, (np.float64, torch.tensor, lambda x: np.array([x])[0], lambda x: x + 1e-9))],
    "14.2": [
        table(lambda rows: [(row[0].capitalize(), *map(torch.tensor, row[1:])) for row in rows]),
        table(lambda rows: [[end, *(1.005 * x for x in numbers)] for end, *numbers in rows]),
        table(lambda rows: [[end, *map(np.float32, numbers)] for end, *numbers in rows]),
        table(lambda rows: [[f" {end}", *numbers] for end, *numbers in rows]),
    ],
    "14.3": [
        pairs(tuple),
        pairs(lambda found: [[word, list(layout)] for word, layout in found]),
        pairs(lambda found: [(word, tuple(map(np.int64, layout[:6])) + layout[6:]) for word, layout in found]),
        repairs_but('{"zero": 1} => {"pp": 8}'),
        repairs_but('{"pp": 2} => {"pp": 1, "dp": 16}'),
    ],
    "14.4": [term(str), term(np.str_), lambda rows: e144.wrong_term([*reversed(rows)])],
    "14.5": [
        *map(constants, (list, torch.tensor, lambda pair: tuple(round(x, 3) for x in pair))),
        lambda rows: e145.calibrate(rows[2:]),
    ],
    "14.6": [
        choice(list),
        choice(lambda found: (found[0], torch.tensor(found[1]), found[2].upper())),
        choice(lambda found: (found[0]._replace(sequence_parallel=found[0].tp > 1), *found[1:])),
    ],
}


@pytest.mark.thorough("eight ranks")
@pytest.mark.parametrize("exercise_id", STRANGE)
def test_strange_right_answers_pass(exercise_id):
    seen = judge(EXERCISES[exercise_id], STRANGE[exercise_id], seed=11)
    assert [(i, case) for i, cases in enumerate(seen) for case in cases if case.status != "PASS"] == []


def scales_all_but_the_last(gradients, *rest):
    kept = gradients[-1].clone()
    norm = e133.clip_over_axes(gradients, *rest)
    gradients[-1].copy_(kept)
    return norm


def does_not_step(world, model, *batch):
    loss, _ = serially(world, copy.deepcopy(model), *batch)
    return loss, cut(world, model)


def clip_but(edit):
    return edited(edit, e133.clip_over_axes)


def step_but(edit):
    return edited(edit, e134.step_on_eight)


NEARLY = {  # with a word of the verdict
    "13.1": [
        (groups(lambda found: None), "NoneType"),
        (groups(len), "int"),
        (groups(lambda found: [*found, found[0]]), "is not right"),
        (groups(lambda found: found[:-1]), "is not right"),
        (groups(lambda found: [[*one, one[-1]] for one in found]), "is not right"),
        (groups(lambda found: [list(map(float, one)) for one in found]), "is not right"),
        (groups(lambda found: [rank for one in found for rank in one]), "is not right"),
        (groups(lambda found: [one[-1:] + one[:-1] for one in found]), "do not ascend"),
    ],
    "13.2": [
        (ranks(lambda found: None), "NoneType"),
        (ranks(len), "int"),
        (ranks(lambda found: [*found, found[0]]), "is not right"),
        (ranks(lambda found: found[1:]), "is not right"),
        (ranks(str), "is not right"),
        (lambda sizes, rank, *rest: {*e132.ranks_to_sum(sizes, rank, *rest)} - {rank}, "leave out the rank itself"),
        (lambda *case: e132.ranks_to_sum(*case[:-1], True), "t times too large"),
        (lambda *case: e132.ranks_to_sum(*case[:-1], False), "partial gradient"),
    ],
    "13.3": [
        (through_comm, "for torch.distributed alone"),
        (norm(lambda x: None), "is a `return` missing?"),
        (norm(lambda x: x * (1 + 1e-4)), "the norm is not right"),
        (scales_all_but_the_last, "the gradients"),
        (clip_but("(max_norm / norm).clamp(max=1) => 0.999 * (max_norm / norm).clamp(max=1)"), "the gradients"),
        (clip_but("(max_norm / norm).clamp(max=1) => max_norm / (norm + max_norm)"), "the gradients"),
        (clip_but("x.square().sum() / count => x.abs().sum() / count"), "the norm is not right"),
        (lambda gradients, *rest: e133.clip_over_axes(gradients[::-1], *rest), "the norm is not right"),
        (clip_but("all_reduce(square) => all_reduce(square, op=dist.ReduceOp.MAX)"), "is not right"),
        (as_(clip_but("/ count =>"), float), "counts every copy"),
    ],
    "13.4": [
        (stepped(lambda found: (found[0], [])), "what was returned"),
        (step_but('fact.sum_over => fact.sum_over if fact.crosses else mesh.group("dp", "tp")'), "not right"),
        (step_but("(targets != -100) => (y != -100)"), "the loss is not right"),
        (stepped(lambda found: (found[0], [f for f in found[1] if "norm1" not in f.name])), "after the step is not"),
        (does_not_step, "after the step"),
        (as_(step_but("(targets != -100) => dp.size * (y != -100)"), lambda x: (x[0].item(), x[1])), "of two means"),
    ],
    "13.5": [
        (lambda: None, "what was returned"),
        (lambda: (("tp", 6), ("dp", 5)), "Report 1: rank is not right"),
        (lambda: ((5, "dp"), (6, "tp")), "Report 1"),
        (lambda: ((6, "tensor"), (5, "dp")), "Report 1: axis is not right"),
        (lambda: ((6,), (5,)), "Report 1 is not right"),
    ],
    "13.6": [
        (layout(lambda found: (Layout, *found[1:])), "did not return a Layout"),
        (layout(lambda found: found[:3]), "Return four things"),
        (lambda: Layout(dp=2, pp=4, tp=8, zero=3), "zero=3 and pp=4"),
        (e136.but(Layout(2, 4, 8, microbatches=48, zero=1, **SLIM)), "64 sequences cannot"),
        (e136.but(Layout(1, 8, 8, microbatches=4, schedule="interleaved", stages_per_rank=2, **SLIM)), "m"),
        (e136.but(Layout(2, 4, 8, order="tp,pp,dp", microbatches=32, zero=1, **SLIM)), "✗ a tp group"),
        (e136.but(Layout(dp=64, zero=3, recompute="full")), "gradients are sent between nodes"),
        (layout(lambda found: (found[0], 86.7 / 1.024**3, *found[2:])), "with the highest peak is not right"),
        (layout(lambda found: (found[0], "86.7", *found[2:])), "with the highest peak is not right"),
        (layout(lambda found: (*found[:2], None, found[3])), "layout B, the bubble is not right"),
        (layout(lambda found: (*found[:3], 12.5)), "to other nodes is not right"),
    ],
    "14.1": [
        (seconds(lambda x: None), "is a `return` missing?"),
        (seconds(str), "is not right"),
        (seconds(lambda x: 1.0001 * x), "is not right"),
        (edited("sum(stages[:-1]) => sum(stages[1:])", e141.uneven_step), "is not right"),
    ],
    "14.2": [
        (lambda: None, "what was returned"),
        (table(lambda rows: rows[:2]), "what was returned"),
        (table(lambda rows: [[end, *(1.02 * x for x in numbers)] for end, *numbers in rows]), "is not right"),
        (table(lambda rows: [[end, *(1e9 * x for x in numbers)] for end, *numbers in rows]), "are in bytes"),
        (edited('"last", states_c => 3, states_c', e142.fullest_ranks), "layout C: the rank"),
        (edited('acts_c, logits_c => acts_c, "3.76 GB"', e142.fullest_ranks), "layout C: logits"),
        (edited("acts_a, 0 => acts_a, 0.1", e142.fullest_ranks), "layout A: logits"),
    ],
    "14.3": [
        (pairs(lambda found: None), "Return six pairs"),
        (pairs(lambda found: found[:5]), "Return six pairs"),
        (pairs(lambda found: [None, *found[1:]]), "Layout 1"),
        (repairs_but('{"tp": 2} => {"tp": 4}'), "a different single change costs less"),
        (repairs_but('{"tp": 4} => {"tp": 0}'), "is a Layout4D"),
        (repairs_but('"batch", {"rows": 1} => "batch", {"rows": 3}'), "Layout 3"),
        (repairs_but('"activations", {"rows": 1} => "activations", {"pp": 32}'), "still cannot"),
    ],
    "14.4": [
        (term(lambda found: None), "is a `return` missing?"),
        (lambda rows: "tp", "planner"),
        (term(lambda found: {found}), "is not right"),
        (term(lambda found: "dp" if found == "bubble" else found), "is not right"),
    ],
    "14.5": [
        (lambda rows: ("0.6", "much"), "Return two numbers"),
        (lambda rows: (0.0, 0.5), "Return two numbers"),
        (lambda rows: (float("nan"), 0.5), "Return two numbers"),
        (lambda rows: (0.6, float("inf")), "between 0"),
        (lambda rows: (0.6, 0.5), "are off"),
        (lambda rows: e145.share_alone(rows, 0.15), "without tensor parallelism"),
    ],
    "14.6": [
        (choice(lambda found: found[:2]), "Return three things"),
        (choice(lambda found: (found[0]._replace(cp=2), *found[1:])), "Return a Layout4D"),
        (choice(lambda found: (found[0]._replace(rows=3), *found[1:])), "refuses"),
        (choice(lambda found: (found[0]._replace(recompute="full"), *found[1:])), "larger regret"),
        (choice(lambda found: (*found[:2], ["dp"])), "name of a kind of time"),
        (choice(lambda found: (found[0], 0.5, found[2])), "the number, at [0], is not right"),
        (choice(lambda found: (found[0], "0.5", found[2])), "the number, at [0], is not right"),
    ],
}


@pytest.mark.thorough("eight ranks", keep=2)
@pytest.mark.parametrize("exercise_id", NEARLY)
def test_nearly_right_answers_do_not_pass(exercise_id):
    seen = judge(EXERCISES[exercise_id], [answer for answer, _ in NEARLY[exercise_id]], seed=11)
    for i, (cases, (_, words)) in enumerate(zip(seen, NEARLY[exercise_id], strict=True)):
        hints = " ".join(" ".join(case.advice for case in cases).split())
        assert "FAIL" in {case.status for case in cases} and words in hints, (i, cases)


def by_the_groups_method(x, inside, across):
    dist.group.WORLD.allreduce([x]).wait()
    return x


def with_an_extra_message(by):
    def program(gradients, copies, max_norm, groups):
        by().allreduce([torch.zeros(100, dtype=torch.float64)]).wait()
        return e133.clip_over_axes(gradients, copies, max_norm, groups)

    return program


@pytest.mark.thorough("eight ranks", keep=1)
@pytest.mark.parametrize(
    ("exercise_id", "answer"),
    [
        ("16.1", by_the_groups_method),
        ("13.3", with_an_extra_message(lambda: dist.group.WORLD)),
        ("13.3", with_an_extra_message(lambda: dist.group.WORLD._get_backend(torch.device("cpu")))),
    ],
)
def test_messages_by_the_methods_of_a_process_group_count(exercise_id, answer):
    ((verdict,),) = judge(EXERCISES[exercise_id], [answer], seed=3)
    assert verdict.status == "FAIL" and re.search("sen[dt]", verdict.hint), verdict
