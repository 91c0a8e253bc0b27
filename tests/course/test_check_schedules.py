"""Chapters 9 to 12: answers that are nearly right. Chapters 3, 5, 8, 10: reports in tasks are what a run prints."""

import re
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course.check.catalogue import EXERCISES
from course.check.exercise import random
from course.check.judge import judge
from course.exercises.ch08 import e08_3_at_fault as e083
from course.exercises.ch09.e09_1_in_memory import in_memory
from course.exercises.ch09.e09_2_kept import kept
from course.exercises.ch10 import e10_3_missing_calls as e103
from course.exercises.ch10.e10_1_repaired_step import repaired_step
from course.exercises.ch10.e10_2_sum_and_clip import sum_and_clip
from course.exercises.ch10.e10_4_evaluated import evaluated
from course.exercises.ch11 import e11_1_corrected_order as e111
from course.exercises.ch11.e11_2_choose_stages import choose_stages
from lib import comm
from lib.launch import HangError, run
from lib.pipeline.lower import lower, other_end
from lib.pipeline.schedules.action import RECVS, SENDS, ScheduleError
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.course.answers import assert_told, edited

ROOT = Path(__file__).parents[2]
RIGHT = e103.LOST[0]


pytestmark = pytest.mark.usefixtures("own_progress")


def printed(page: str, name: str) -> str:
    """The code on a page that defines this function: of a task, or of a code cell."""
    return code_in((ROOT / page).read_text(encoding="utf-8"), name)


def code_in(text: str, name: str) -> str:
    """The code in this Markdown that defines this function."""
    (code,) = (
        c for c in re.findall(r"```(?:python|{code-cell} ipython3)\n(.*?)```", text, re.S) if f"def {name}(" in c
    )
    return code


def program(page: str, name: str):
    """A function that the page of solutions prints in a task."""
    return written(printed(f"solutions/{page}", name), name)


def written(code: str, name: str):
    """The function of this name that the code defines."""
    names = {"torch": torch, "dist": dist, "comm": comm}
    exec(code, names)
    return names[name]


def page_of(name: str) -> str:
    return (ROOT / "solutions" / name).read_text(encoding="utf-8")


def reports_in(text: str) -> list[str]:
    return re.findall(r"```text\n((?:deadlock|hang): .*?)\n```", text, re.S)


def wrong_order(*given):
    program("11_interleaving.md", "wrong_order")(*given)


def waits(report: str) -> list[str]:
    """The report without seconds and source lines."""
    return [re.sub(r"  for [\d.]+ s  .*", "", " ".join(line.split(" "))).strip() for line in report.splitlines()]


# ---- what is said ---------------------------------------------------------------------------------------------------


def waits_twice_for_nothing(forward, backward, like, m):
    repaired_step(forward, backward, like, m)
    if dist.get_rank() == 0:
        dist.recv(torch.empty_like(like), src=1)


RECEIVES_AHEAD = """
last, sends = group.size - 1, [] => last, sends, xs = group.size - 1, [], received(inputs, width, group, {})
comm.recv(like, group, group.rank - 1).wait() => next(xs)
"""
KEEPS_TWO = """
if sends: => if len(sends) > 1:
sends.pop() => sends.pop(0)
"""


def blocks_at_both_ends(gradients, holders, max_norm, group):
    for name, ranks in holders.items():
        for transfer in (comm.send, comm.recv):
            for r in ranks:
                if group.rank in ranks and r != group.rank:
                    transfer(gradients[name], group, r).wait()


TOLD = [
    ("09.1", lambda *case: in_memory(*case).replace("B", "X"), "X0' is not an action"),
    (
        "09.1",
        lambda n, m, limit: in_memory(n, m + (n == 2), limit),
        "its size is not right",
        "got '2 ranks, 4 microbatches'",
    ),
    ("09.2", edited("= num_microbatches => = max(num_microbatches, num_ranks)", kept), "kept('GPipe', "),
    ("09.2", lambda *given: kept(*given)[0], "expected '2 results' got 'int'"),
    ("09.2", lambda *given: torch.tensor(kept(*given)).tolist()),
    ("10.1", waits_twice_for_nothing, "rank 0 waits in recv from 1"),
    ("10.2", blocks_at_both_ends, "Every rank of the cycle sends first"),
    ("10.2", lambda *given: float(sum_and_clip(*given))),
    ("10.4", lambda *given: evaluated(*given).float().tolist()),
    ("10.4", edited(RECEIVES_AHEAD.format(1), evaluated)),
    ("10.4", edited(RECEIVES_AHEAD.format(2), evaluated), "more than one input in advance"),
    ("10.4", edited(KEEPS_TWO, evaluated), "more than one output whose send"),
    ("11.1", wrong_order, "the result of the program in the task"),
    ("11.2", lambda *given: np.array(choose_stages(*given))),
    ("11.2", lambda *given: choose_stages(*given)[:2], "expected '3 results' got '2 results'"),
    ("10.3", lambda: RIGHT[0], "Report 1", "got 'None'"),
    ("10.3", lambda: (RIGHT[0], "1SEND_F3"), "1/2 points", "Report 2"),
]


@pytest.mark.parametrize("row", TOLD, ids=lambda row: row[0])
def test_what_is_said(row):
    assert_told(*row)


def test_the_step_whose_messages_cross_on_two_ranks_is_right_on_three():
    (cases,) = judge(replace(EXERCISES["11.1"], ranks=(3,)), [wrong_order], seed=1)
    assert [case.status for case in cases] == ["PASS"]


def gradients_of(world, program, given):
    """The gradients of a rank's stages, by stage, in the placement of row A."""
    step, like = e111.Stages(**given), torch.empty(3, dtype=torch.float64)
    orders = e111.orders_of(world.size, 6, 2, e111.from_the_last)
    written(program, "wrong_order")(world, orders, step.forward, step.backward, like)
    return {stage: step.gradients[stage] for _, stage, _ in orders[world.rank]}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_tags_of_row_a_are_enough_on_three_ranks_and_give_the_errors_of_the_task_on_two(ranks):
    task, generator = EXERCISES["11.1"].rows["A"].task, torch.Generator().manual_seed(0)
    given = {name: [random(generator, 3) for _ in range(n)] for name, n in (("weights", 2 * ranks), ("batch", 6))}
    (code,) = re.findall(r"```python\n(.*?)```", task, re.S)
    found = {s: g for one in run(gradients_of, ranks, code, given) for s, g in one.items()}
    right = [w.grad for w in e111.with_gradients(**given)]
    errors = [f"{(found[s] - g).norm() / g.norm():.2f}" for s, g in enumerate(right)]
    printed = re.search(r"norm of the error.*? \| (.*) \|$", task)[1].split(" | ")
    assert errors == (printed if ranks == 2 else ["0.00"] * 6)


# ---- chapter 10: the reports ----------------------------------------------------------------------------------------


def wrong_step_of_the_task(world, m):
    like = torch.zeros(4, 3)
    program("10_running.md", "wrong_step")(lambda k, x: like, lambda k, g: like, like, m)


def messages(world, schedule):
    """Each message is waited for; that of microbatch k has 16 (k + 1) elements."""
    for action in (a for a in schedule.actions[world.rank] if a.op in (*SENDS, *RECVS)):
        x, peer = torch.zeros(16 * (action.microbatch + 1)), schedule.rank_of[other_end(action).stage]
        if action.op in SENDS:
            comm.send(x, world, peer).wait()
        else:
            comm.recv(x, world, peer).wait()


def without(action: str):
    right = lower(one_f_one_b(4, 4))
    return replace(right, actions=tuple(tuple(a for a in row if str(a) != action) for row in right.actions))


def test_the_reports_of_hangs_are_what_a_run_prints():
    lost = [action for of_row in e103.LOST for action in of_row]
    said = [
        *reports_in(page_of("10_running.md")),
        *(report for one in EXERCISES["10.3"].variants for report in reports_in(one.task)),
    ]
    hangs = [(wrong_step_of_the_task, 8), *((messages, without(action)) for action in lost)]
    for report, (program, argument) in zip(said, hangs, strict=True):
        with pytest.raises(HangError) as error:
            run(program, 4, argument)
        assert waits(report) == waits(str(error.value))
    assert said[1:] == [report for action in lost for report in reports_in(e103.report(action))]


# ---- chapters 3, 5 and 8: the reports, with their files and lines ----------------------------------------------------

DROPS = """
class Unit:
    shard = torch.zeros(100)

    def compute(self, full, x):
        return x


def step(world, kept):
    wrong_forward(torch.zeros(1), [Unit() for _ in kept[0]], kept[world.rank], world)
"""
KEPT = [1, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1]
KEPT_UNTIL_EXIT = [1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1]
CORRUPT = """

def step(world):
    batches = [(torch.zeros(4, 3), torch.zeros(4, 2)) for _ in range(10)]
    if world.rank == 1:
        batches[3][1][0, 0] = torch.nan
    endless(torch.nn.Linear(3, 2), batches, world)
"""
STAGES = """

def step(world, orders, sequences):
    stage = cut(fresh(), world.size)[world.rank]
    pieces = list(zip(inputs.split(sequences), targets.split(sequences)))
    forward, backward, sends = one_stage(stage, pieces, world)
    for op, k in orders[world.rank]:
        forward(k) if op == "F" else backward(k)
    for send in sends:
        send.wait()
"""


def file_of_drops(text: str) -> str:
    return "import torch\n\nfrom lib import comm\n\n\n" + code_in(text, "wrong_forward") + DROPS


def file_of_corrupt(text: str) -> str:
    imports = "import torch\nfrom torch.nn.functional import mse_loss\n\nfrom lib import comm\n\n\n"
    return imports + code_in(text, "endless") + CORRUPT


def file_of_stages(text: str) -> str:
    """The program of the chapter: its two cells."""
    imports = (
        "import torch\n\nfrom lib import comm, data\n"
        "from lib.model import GPT, GPTConfig, mean_loss\nfrom lib.pipeline.stage import cut\n\n"
    )
    model, stage = (printed("chapters/08_pipelines.md", name) for name in ("fresh", "one_stage"))
    return f"{imports}{model}\n\n{stage}{STAGES}"


def with_the_fault_of_pipeline_b(row: str = "") -> list[list[tuple[str, int]]]:
    """GPipe, in which one rank runs an action before its last forward."""
    at_fault, action, _ = EXERCISES["08.3"].rows[row].right[0]()[1]
    schedule = e083.too_early(at_fault, action, place=3)
    return [[(str(a.op), a.microbatch) for a in of_rank] for of_rank in schedule.actions]


def sick_stages(row: str) -> dict:
    return {"orders": with_the_fault_of_pipeline_b(row), "sequences": [4, 3, 2, 1]}


@pytest.mark.parametrize(
    ("text", "file", "ranks", "arguments"),
    [
        (EXERCISES["03.8"].rows["A"].task, file_of_corrupt, 3, {}),
        (page_of("05_fsdp.md"), file_of_drops, 3, {"kept": KEPT}),
        (EXERCISES["05.5"].rows["A"].task, file_of_drops, 3, {"kept": KEPT_UNTIL_EXIT}),
        (page_of("08_pipelines.md"), file_of_stages, 4, sick_stages("")),
        *((one.task, file_of_stages, 4, sick_stages(one.row)) for one in EXERCISES["08.3"].variants),
    ],
    ids=["03.8 A", "05.5", "05.5 A", "08.3", "08.3 A", "08.3 B"],
)
def test_the_reports_with_lines_of_a_file_are_what_a_run_prints(text, file, ranks, arguments, tmp_path, monkeypatch):
    (tmp_path / "step.py").write_text(file(text), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "step", raising=False)
    with pytest.raises(HangError) as error:
        run(partial(import_module("step").step, **arguments), ranks)
    (report,) = reports_in(text)
    said = re.sub(r"for \d\.\d s", "for 2.1 s", str(error.value))  # a look at the ranks may come a little later
    assert said == report


def test_the_slow_pipelines_are_drawn_and_have_one_explanation():
    every = defaultdict(set)
    for rank, actions in enumerate(e083.GPIPE.actions):
        for place, later in ((i, a) for k, a in enumerate(actions) for i in range(k)):
            with suppress(ScheduleError):
                every[e083.chart(e083.too_early(rank, str(later), place))].add((rank, str(later)))
    texts = {"": page_of("08_pipelines.md")} | {one.row: one.task for one in EXERCISES["08.3"].variants}
    for row, text in texts.items():
        rank, action, lost = EXERCISES["08.3"].rows[row].right[0]()[0]
        (chart,) = (one for one in every if one in text)
        assert every[chart] == {(rank, action)}, row
        assert len(chart.splitlines()[1]) - len("rank 0  ") == 3 * (21 + lost) - 1, "the last backward of rank 0"


def where_ranks_wait(lost: str) -> tuple[str, ...]:
    return tuple(str(row[0]) if row else "" for row in e103.left_without(lost))


def test_each_report_has_one_explanation():
    explanations = defaultdict(list)
    for action in (str(a) for row in e103.messages(e103.SCHEDULE) for a in row):
        explanations[where_ranks_wait(action)].append(action)
    for action in (action for of_row in e103.LOST for action in of_row):
        assert explanations[where_ranks_wait(action)] == [action]
