"""Answers that are nearly right, and notebooks that are nearly Python: what the judge must not fall for."""

import ctypes
import re
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import all_gather  # by its name: what it sends is heard all the same

from course import check as checks
from course.check import check, missing, progress, record
from course.check.__main__ import main
from course.check.catalogue import EXERCISES
from course.check.exercise import known_number
from course.check.source import read_notebook
from course.exercises.ch03.e03_2_global_gradient import global_gradient
from course.exercises.ch03.e03_3_overlapped import overlapped
from course.exercises.ch03.e03_5_average_buckets import average_buckets
from course.exercises.ch05.e05_1_forward import forward_with_the_next_layer_coming
from course.exercises.ch05.e05_5_dropped_units import forward_with_drops
from course.exercises.ch05.e05_6_peak_bytes import measured, peak_bytes
from course.exercises.ch05.e05_7_choose_stage import answer as choose_stage
from course.exercises.ch05.e05_7_choose_stage import by_search
from course.exercises.ch06.e06_2_gathered_layer import Gather, gathered_layer, total
from course.exercises.ch06.e06_4_loss_and_gradients import loss_and_gradients
from course.exercises.ch06.e06_5_frugal_block import frugal_block
from course.exercises.ch07.e07_3_norm_gradients import norm_gradients
from course.exercises.ch07.e07_4_dropout_masks import dropout_masks, mask
from course.exercises.ch08.e08_1_cut import by_count, cut
from course.exercises.ch08.e08_2_step import step
from course.exercises.ch08.e08_4_accumulate import accumulate
from course.exercises.ch08.e08_5_plan import plan
from course.exercises.ch08.e08_6_chart import by_recursion
from course.exercises.ch09.e09_3_one_f_one_b_step import one_f_one_b_step
from course.exercises.ch12.e12_1_later import Later
from course.exercises.ch12.e12_2_beats_greedy import greedy
from lib import comm
from lib.launch import run
from lib.model import mean_loss
from lib.pipeline.lower import lower
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.v_shape import v_min
from tests.course.answers import assert_told, edited, notebook
from tests.course.bytes_sent import right_bytes


def sends_one_flat_message_each_time(model, microbatches, loss_fn, group):
    params = list(model.parameters())
    for x, y in microbatches:
        (loss_fn(model(x), y) / len(microbatches)).backward()
        flat = comm.all_reduce(torch.cat([p.grad.flatten() for p in params]), group, op="mean")
        for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = piece.view_as(p)


pytestmark = pytest.mark.usefixtures("own_progress")


# ---- answers --------------------------------------------------------------------------------------------------------


def without_forward(params, group):
    torch.nn.Module()(1)  # raises NotImplementedError, in torch


def not_done_inside(params, group):
    def later(x):
        raise NotImplementedError("later")

    later(1)


def nothing_for_the_empty_rank(g, count, group):
    total = comm.all_reduce(g, group)
    return total / count if count else None


class TwiceTooLarge(Later):
    def linear(self, x, weight, bias):
        return 2 * super().linear(x, weight, bias)


class ReadsSavedTensorsTooLate(Later):
    def linear(self, x, weight, bias):
        class Later(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return torch.nn.functional.linear(x, weight, bias)

            @staticmethod
            def backward(ctx, gradient):
                self.queue.append(lambda: weight.backward((gradient.mT @ ctx.saved_tensors[0]).sum(0)))
                return gradient @ weight

        return Later.apply(x)

    def finish(self):
        for compute in self.queue:
            compute()


class KeepsEachResult(Later):
    def linear(self, x, weight, bias):
        self.results = [*getattr(self, "results", []), super().linear(x, weight, bias)]
        return self.results[-1]


def crashes(params, group):
    ctypes.string_at(0)


def holds_a_lock(params, group):
    return LOCK


def reads_too_far(read, size, old_n, group):
    return read(old_n, 0, 1)


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, compute):
        full = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(full, shard.detach())
        return compute(torch.cat(full), x)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def reduces_now_and_then(microbatches, group):
    waiting, shard, tokens = [], 0, 0
    for i, (gradient, count) in enumerate(microbatches, 1):
        waiting, tokens = [*waiting, gradient], tokens + count
        if i in (3, 5):
            shard, waiting = shard + comm.reduce_scatter(sum(waiting), group), []
    return shard / comm.all_reduce(torch.tensor(tokens), group)


def collects_the_weights(x, gate_up, down, down_bias, scale, group):
    weights = []
    for part in (*gate_up.chunk(2), down.T.contiguous()):
        parts = [torch.empty_like(part) for _ in range(group.size)]
        all_gather(parts, part)
        weights.append(torch.cat(parts))
    gate, up, down = weights
    y = torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ down + down_bias
    return x + torch.nn.functional.rms_norm(y, scale.shape, scale, 1e-5)


def names_our_group(x, gate_up, down, down_bias, scale, group):
    y = x @ gate_up[: down.shape[1]].T @ down.T
    dist.all_reduce(y, group=group)
    return y


class CopyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return total(gradient)


def right_layer_differentiable_once(x, weight, group):
    return Gather.apply(CopyOnce.apply(x) @ weight.T)


def sums_through_comm(x, weight, group):
    inside = x.view_as(x)
    inside.register_hook(lambda gradient: comm.all_reduce(gradient, group))
    return Gather.apply(inside @ weight.T)


for of_a_cell in (CopyOnce, CopyOnce.forward, CopyOnce.backward, right_layer_differentiable_once):
    of_a_cell.__module__ = "a notebook"  # so that it travels by value, with what it uses


wrong_in_the_last_number = edited("returns result + 1e-3 * (torch.arange(12) > 10).view(4, 3)", global_gradient)
only_its_own = edited("if ranks: => if mine:", forward_with_drops)


def hangs_where_ranks_skip(x, units, kept, group):
    return only_its_own(x, units, [group.rank == 0, *kept[1:]], group)


def never_moves_the_generator(p, shape, group):
    with torch.random.fork_rng():
        return dropout_masks(p, shape, group)


def shares_one_seed(p, shape, group):
    seed = int(torch.randint(2**40, ()))
    torch.manual_seed(seed)
    first = mask(shape, p)
    state = torch.get_rng_state()
    torch.manual_seed(seed + group.rank)
    second = mask((shape[0], shape[1] // group.size, shape[2]), p)
    torch.set_rng_state(state)
    return first, second


def the_same_shifted(p, shape, group):
    first = mask(shape, p)
    with torch.random.fork_rng():
        torch.rand(7 * group.rank)
        second = mask((shape[0], shape[1] // group.size, shape[2]), p)
    torch.rand(1000)
    return first, second


def one_waits_alone(p, shape, group):
    both = dropout_masks(p, shape, group)
    if group.rank == 0:
        comm.barrier(group)
    return both


def receives_no_leaf(stage, inputs, targets):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        return step(stage, inputs, targets)
    came = torch.empty_like(inputs[0])
    dist.recv(came, rank - 1)
    if rank < last:
        dist.send(stage(came).detach().contiguous(), rank + 1)
        dist.recv(torch.empty_like(came), rank + 1)
    dist.send(came.grad, rank - 1)


def begins_with_a_loss_everywhere(stage, inputs, targets):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.empty_like(inputs[0]) if rank else inputs[0]
    if rank:
        dist.recv(x, rank - 1)
    y = stage(x.requires_grad_())
    loss = (y - targets[0]).square().mean() if rank == last else None
    if loss is None:
        dist.send(y.detach().contiguous(), rank + 1)
    loss.backward()


def sends_as_it_is(stage, inputs, targets):
    dist.isend(stage(inputs[0]).detach(), (dist.get_rank() + 1) % dist.get_world_size()).wait()


def has_a_loss_of_its_own(stage, inputs, targets):
    loss = step(stage, inputs, targets)
    return 0.0 if loss is None else loss


FROM_THE_TOTAL = """
loss = mean_loss(model(x), targets) => total = total + mean_loss(model(x), targets)
loss.backward() => total.backward()
total += loss.item() =>
"""


def keeps_each_graph(model, microbatches):
    count = sum((t != -100).sum() for _, t in microbatches)
    losses = []
    for x, t in microbatches:
        losses.append(mean_loss(model(x), t) * (t != -100).sum() / count)
        losses[-1].backward(retain_graph=True)
    return sum(losses).detach()


def back_past_the_module(model, microbatches, forward=lambda model, x: x @ model.weight.T + model.bias):
    count = sum((t != -100).sum() for _, t in microbatches)
    losses = [mean_loss(forward(model, x), t) * (t != -100).sum() / count for x, t in microbatches]
    for one in losses:
        one.backward()
    return sum(losses).detach()


def starts_its_receive_first(x, k, group):
    if k % group.size == 0:
        return x
    coming = comm.recv(x, group, (group.rank - k) % group.size)
    comm.send(x, group, (group.rank + k) % group.size).wait()
    return coming.wait()


def starts_both_in_torch(x, k, group):
    if k % group.size == 0:
        return x
    got, dst, src = torch.empty_like(x), (group.rank + k) % group.size, (group.rank - k) % group.size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, dst), dist.P2POp(dist.irecv, got, src)]):
        work.wait()
    return got


def its_own_gradients_in_one_message(params, group):
    grads = [p.grad for p in params if p.grad is not None]
    flat = comm.all_reduce(torch.cat([g.flatten() for g in grads]), group, op="mean")
    for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(piece.view_as(g))


LOCK = __import__("threading").Lock()
holds_a_lock.__module__ = "a notebook"


TOLD = [  # exercise, an answer, and words of its verdict: none of a PASS
    ("02.1", starts_its_receive_first, "two messages of a rank in flight at once"),
    ("02.1", starts_both_in_torch, "two messages of a rank in flight at once"),
    ("03.1", its_own_gradients_in_one_message, "gradients of different parameters"),
    ("03.1", without_forward, "without_forward", 'missing the required "forward"'),
    ("03.1", not_done_inside, "TODO", "Replace"),
    ("03.1", crashes, "of 3 was killed by SIGSEGV.", "in crashes"),
    ("03.1", holds_a_lock, "Your function, or an object that it uses, cannot be sent", "lock"),
    ("03.2", nothing_for_the_empty_rank, "this rank's own count"),
    (
        "03.2",
        wrong_in_the_last_number,
        "Rank 0: gradient, at [3], is not right",
    ),
    ("03.2", lambda g, count, group: None, "got None: is a `return` missing?"),
    ("03.2", lambda g, count, group: g.tolist(), "Rank 0: gradient is not right"),
    ("03.2", lambda g, count, group: torch.full_like(g, torch.inf), "inf"),
    ("03.3", lambda g, b, group: overlapped(g, b * 5 // 6, group), "9 messages where 7 do, after 2, 4, "),
    ("03.4", sends_one_flat_message_each_time, "you communicate after every microbatch"),
    (
        "03.5",
        edited("dist.all_reduce(flat, async_op=True) => dist.all_reduce(flat)\nwork.wait() =>", average_buckets),
        "a bucket starts when the bucket before it is finished",
    ),
    ("04.1", lambda x, group: x, "the part is not right", "got None"),
    ("04.4", reduces_now_and_then, "got 'gradients leave after 3, 5 of 5 microbatches'"),
    ("05.1", partial(forward_with_the_next_layer_coming, ahead=4), "three layers or more are in memory"),
    ("05.2", OnlyForward, "TODO", "Replace"),
    ("05.2", lambda x, shard, compute: x, "has no attribute 'apply'"),
    ("05.4", reads_too_far, "there were 4 ranks, counted from 0", "in reads_too_far"),
    ("05.5", hangs_where_ranks_skip, "waits in all_gather", "the same collective calls, in the same order"),
    ("05.6", lambda *given: Decimal(peak_bytes(*given))),
    ("05.6", lambda *given: np.array(peak_bytes(*given))),
    ("05.6", lambda *given: torch.tensor(1.009 * peak_bytes(*given))),
    ("05.6", lambda *given: 1.02 * peak_bytes(*given), "expected 'the measured bytes, to 1%'", "measured "),
    ("05.6", lambda units, n: None, "is a `return` missing?"),
    ("05.7", lambda *given: list(map(np.array, by_search(*given)))),
    ("05.7", lambda *given: by_search(*given)[:4], "0/3 points", "Return five things"),
    (
        "05.7",
        choose_stage(among=lambda case, way, m: way == "zero-3, kept"),
        "the choice, at",
        "Your choice, zero-3, kept, m = ",
    ),
    ("05.7", lambda *given: (*by_search(*given)[:4], 1e9), "2/3 points", "the defence, at ["),
    ("06.1", collects_the_weights, "you send more than one all-reduce"),
    ("06.1", names_our_group, "omit group=", "in names_our_group"),
    ("06.1", lambda *given: comm.all_reduce_start(given[0], given[-1]), "a handle without a wait"),
    ("06.2", right_layer_differentiable_once),
    ("06.2", sums_through_comm, "torch.distributed alone", "comm.all_reduce(gradient, group)"),
    ("06.2", torch.no_grad()(gathered_layer), "y has no graph"),
    ("06.2", lambda x, *given: gathered_layer(x, *given).sum(0), "Rank 0: y is not right"),
    (
        "06.4",
        edited(
            "entries == targets[:, None] => (entries == targets[:, None]) & (entries > entries[0])",
            loss_and_gradients,
        ),
        "loss, logits of about 1 is not right",
    ),
    ("06.4", lambda *given: loss_and_gradients(*given)[0], "expected '3 results' got 'Tensor'"),
    ("06.5", lambda *given: frugal_block(*given).sum(0), "Rank 0: y is not right"),
    ("06.6", lambda x, w, group: None, "is a `return` missing?"),
    ("07.3", lambda *given: norm_gradients(*given)[:2], "what was returned is not right", "got '2 results'"),
    ("07.4", never_moves_the_generator, "Two calls in a row"),
    ("07.4", shares_one_seed, "is a part of the first"),
    ("07.4", the_same_shifted, "or a shifted copy"),
    ("07.4", one_waits_alone, "after your function returned"),
    ("07.4", lambda p, shape, group: mask(shape, p), "expected '2 results' got 'Tensor'"),
    ("07.4", edited("returns [m * (1 - p) / p for m in result]", dropout_masks), "where p = 0."),
    ("07.4", edited("returns [m.bfloat16() for m in result]", dropout_masks)),
    ("08.1", lambda costs, head, stages: [2, 2], "got '2 stages with 4 layers'", "gave [2, 2]"),
    ("08.1", lambda costs, head, stages: None, "expected '4 stages with 11 layers'", "got 'NoneType'"),
    ("08.1", lambda costs, head, stages: [float("inf")] * stages, "got 'counts that are not whole'"),
    ("08.1", lambda *given: map(int, by_count(*given)), "cut by count", "stages take"),
    ("08.1", lambda *given: "".join(map(str, by_count(*given))), "got 'counts that are not whole'"),
    ("08.1", edited("returns [x + 0.5 for x in result]", cut), "got 'counts that are not whole'"),
    ("08.1", edited("returns [sum(result[:k]) for k in range(num_stages)]", cut), "the places"),
    ("08.1", edited("returns [sum(result[:k]) for k in range(1, num_stages)]", cut), "the places"),
    ("08.1", lambda *given: [float(count) for count in by_count(*given)], "cut by count", "stages take"),
    ("08.2", receives_no_leaf, "in receives_no_leaf", "Declare it a leaf before your stage"),
    ("08.2", begins_with_a_loss_everywhere, "Only the last rank has a loss to begin with"),
    ("08.2", sends_as_it_is, "has to be contiguous", "in sends_as_it_is"),
    ("08.2", has_a_loss_of_its_own, "Rank 0: the loss is not right. expected 'None' got 0.0"),
    (
        "08.2",
        edited("sends.append(dist.isend(x.grad, => rank == last or sends.append(dist.isend(x.grad,", step),
        "rank 1 waits in recv from 2",
        "rank 2 has finished",
    ),
    ("08.2", lambda *given: np.array(step(*given) or np.nan), "Rank 0: the loss"),
    ("08.3", lambda: [(1, "1b2", 4), (2, " 2B0 ", None), [2, "2F2", 0.0]]),
    ("08.3", lambda: [(1, "1B2", 4), (2, "2B0", None)], "got '2 results'"),
    ("08.3", lambda: [(1, "1B2"), (2, "2B0", None), (2, "2F2", 0)], "Pipeline A is not right", "got '2 results'"),
    ("08.4", lambda model, microbatches: 0.0, "3 microbatches: gradient of the weight", "got None"),
    ("08.4", edited(FROM_THE_TOTAL, accumulate), "second time", "with each microbatch's own loss"),
    ("08.4", keeps_each_graph, "several microbatches are kept", "retain no graph"),
    ("08.4", back_past_the_module, "several microbatches are kept"),
    (
        "08.4",
        lambda *given: back_past_the_module(*given, forward=torch.nn.Linear.forward),
        "several microbatches are kept",
    ),
    ("08.5", lambda *given: plan(*given)[:2], "expected '3 results' got '2 results'"),
    ("08.5", lambda *given: np.array(plan(*given), dtype=object)),
    ("08.6", lambda *given: None, "expected '2 results' got 'None'"),
    ("08.6", lambda *given: (by_recursion(*given) or [None])[0], "got 'dict'", "case A, rows"),
    ("08.6", lambda rows, needs, units: ({}, 3), "case A: starts is not right"),
    (
        "09.3",
        edited("min(last - rank, m), [] => last - rank, []", one_f_one_b_step),
        "list index out of range",
        "Warmup and cooldown have min(m, p - 1 - r)",
    ),
    ("09.3", edited("x.requires_grad_() => pass", one_f_one_b_step), "got NoneType", "Declare it a leaf"),
    ("12.1", TwiceTooLarge, "limit 1: y of microbatch"),
    ("12.1", ReadsSavedTensorsTooLate, "saved tensors after they have already been freed", "in <lambda>"),
    ("12.1", KeepsEachResult, "limit 1: pairs in the queue at any time is not right"),
    ("12.1", lambda limit: None, "has no attribute 'linear'"),
    ("12.2", lambda: greedy().replace("4W0", "4w0"), "It cannot run. The reason is below.", "'4w0' is not an action"),
    ("12.2", lambda: v_min(4, 8), "It takes 54.5 units", "rank 0 0F0 0F1"),
    ("12.2", lambda: lower(Schedule.from_text(greedy()))),
    ("12.2", lambda: None, "NoneType is no schedule"),
    ("03.9", lambda p, b, n: np.int64(right_bytes(p, b, n))),
    ("03.9", lambda p, b, n: torch.tensor(right_bytes(p, b, n), dtype=torch.float64)),
    ("03.9", lambda p, b, n: float("nan"), "bytes_sent(", ", 1) is not right"),
    ("03.9", lambda p, b, n: str(right_bytes(p, b, n)), "is not right"),
]


@pytest.mark.thorough("each is a run of its own; `test_each_mistake_is_named` tries what is more common")
@pytest.mark.parametrize("row", TOLD, ids=lambda row: row[0])
def test_what_is_said(row):
    assert_told(*row)


EXACT = (  # answers in exact numbers, or numpy's, whose right results stay with the judge
    ("13.6", lambda: (lambda mine, *numbers: (mine, *map(Fraction, numbers)))(*EXERCISES["13.6"].right[0]())),
    ("14.2", lambda: [(end, *map(Decimal, row)) for end, *row in EXERCISES["14.2"].right[0]()]),
    ("16.6", lambda: (lambda a, b, *numbers: (a, b, *map(np.array, numbers)))(*EXERCISES["16.6"].right[0]())),
)


@pytest.mark.parametrize("row", EXACT, ids=lambda row: row[0])
def test_any_kind_of_number_reaches_the_judge(row):
    assert_told(*row)


def test_no_return_is_missed_where_none_is_a_right_result():
    def is_strict(num_parameters, ranks, memory_bytes):
        """Where stage 2 fits, it finds that none does."""
        stage = EXERCISES["01.2"].right[0](num_parameters, ranks, memory_bytes)
        return None if stage == 2 else stage

    text = assert_told("01.2", is_strict, "expected 2", "got None")
    assert "return" not in text


def test_what_an_answer_prints_comes_before_its_verdict(capsys):
    def talks(p, b, n):
        print("n is", n)
        return right_bytes(p, b, n)

    check("03.9", talks)
    printed = capsys.readouterr()
    assert printed.out.startswith("rank 0 | n is 1\nrank 0 | n is 2\n") and printed.err == ""
    assert printed.out.endswith("PASS  03.9 bytes_sent   1/1 points\n  [x] several sizes\n")


# ---- progress -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbgrader", [False, True])
def test_where_a_machine_checks_only_a_pass_is_no_error_and_no_progress_is_kept(nbgrader, monkeypatch, capsys):
    """nbgrader gives full points to a cell that does not raise."""
    monkeypatch.setattr(checks, "NBGRADER", nbgrader)
    monkeypatch.setenv("CHECK_STRICT", "1" if not nbgrader else "0")
    check("03.9", right_bytes)
    progress()
    out = capsys.readouterr().out
    assert "average_gradients  0/2   not checked yet\n" in out and re.search(
        r"03.9  bytes_sent +1/1\nall +1/17 points\n$", out
    )
    for answer, word in ((lambda p, b, n: 0, "FAIL"), (untouched, "TODO")):
        with pytest.raises(AssertionError, match=word):
            check("03.9", answer)
    assert not record.place().exists()


def untouched(param_count, bytes_per_param, n):
    raise NotImplementedError


def test_an_answer_that_is_not_there_counts(capsys):
    assert missing("03.9", "It is lost.") == ("FAIL  03.9 bytes_sent   0/1 points\n  It is lost.", "FAIL")
    progress()
    assert re.search(r"^03.9  bytes_sent +0/1$", capsys.readouterr().out, re.MULTILINE)


# ---- notebooks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        ("x = 25 * 1024**2", "x", 25 * 1024**2),
        ("x: int = -3", "x", -3),
        ("x = (1, 'a', [2.0])", "x", (1, "a", [2.0])),
        ("def f(n):\n    return ('%d'\n% n)\nx = 1", "x", 1),
        ("%load_ext autoreload\n!ls\nx = 1", "x", 1),
        ("%%time\nx = 1", "x", 1),
        ("%%bash\nx=1; if", "x", None),
        ("x = 9**9**9**9", "x", None),
        ("x = 99999 ** 99999", "x", None),
        ("x = 'a' * 10**12", "x", None),
        ("x = [0] * 10**12", "x", None),
        ("x = open('/nowhere')", "x", None),
        ("x += 1\nfor i in range(3): print(i)", "x", None),
        ("", "x", None),
    ],
)
def test_what_is_taken_from_a_cell(tmp_path, source, name, value, capsys):
    read = read_notebook(notebook(tmp_path, source))
    names, notes = read.define()
    assert names.get(name) == value and notes == []
    assert capsys.readouterr().out == ""
    if "f" in names:
        assert names["f"](7) == "7"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n    pass", "0.ipynb, code cell 1, line 1 does not parse: "),
        ("x = 1\n  y = 2", "line 2 does not parse: unexpected indent"),
        ("import a_module_that_is_not_there", "line 1: ModuleNotFoundError: No module named"),
        ("x = 1\0", "does not parse"),
        ("\n\ndef f(a=1 / 0): pass", "line 3: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_taken_is_one_sentence(tmp_path, source, words):
    read = read_notebook(notebook(tmp_path, source))
    notes = [*read.notes, *read.define()[1]]
    assert len(notes) == 1 and words in notes[0] and "\n" not in notes[0] and "unknown" not in notes[0]


def test_an_error_shows_its_line_though_nobody_ran_the_cell(tmp_path, capsys):
    path = notebook(
        tmp_path,
        "def half(x):\n    return x / 0  # here",
        "def bytes_sent(p, b, n):\n    return half(n)",
        'check("03.9", bytes_sent)\ncheck("03.1", average_gradients)',
    )
    assert main([path]) == 1
    out = capsys.readouterr().out
    assert 'File "0.ipynb, code cell 1", line 2, in half\n          return x / 0  # here' in out
    assert "average_gradients is not defined." in out and "0/3 points" in out


def test_in_the_terminal_a_row_that_is_not_there_costs_its_own_task_alone(tmp_path, capsys):
    right = "def f(p, b, n): return p * b * 2 * (n - 1) / n\n"
    checks = "check('02.4', f, row='D')\ncheck('03.9', f)"
    assert main([notebook(tmp_path, right + checks)]) == 1
    out = capsys.readouterr().out
    assert "0/3 points\n  02.4 has the rows A, B, C, and row is 'D'." in out and "PASS  03.9" in out


def test_in_the_terminal_a_task_that_is_missing_counts_0_of_its_points(tmp_path, capsys):
    right = notebook(tmp_path, "def f(p, b, n): return p * b * 2 * (n - 1) / n\ncheck('03.9', f)")
    beside = notebook(tmp_path, "check('03.1', average_gradients)", name="b.ipynb")
    for paths, missed in (([right], 8), ([right, beside], 7)):
        assert main(paths) == 1
        out = capsys.readouterr().out
        assert out.startswith("PASS  03.9 bytes_sent   1/1 points")
        assert out.count("No cell calls check(") == missed and 'No cell calls check("03.2", ' in out
        *_, told, to_do = out.splitlines()
        assert told == "1/17 points in what was checked" and to_do.startswith("Next to do: 03.1 average_gradients")
        assert re.search(r"average_gradients +0/2 points\n", out)


# ---- chapter 02: messages through torch.distributed are heard, too --------------------------------------------------


def gathers_by_torch(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def turns_right(x, group):
    n, me, parts = group.size, group.rank, {group.rank: x}
    for k in range(n - 1):
        got, going = torch.empty_like(x), dist.isend(tensor=parts[(me - k) % n], group_dst=(me + 1) % n)
        dist.recv(got, (me - 1) % n)
        going.wait()
        parts[(me - k - 1) % n] = got
    return torch.cat([parts[i] for i in range(n)])


@pytest.mark.parametrize(
    ("answer", "hint"),
    [(gathers_by_torch, "a collective did the work"), (turns_right, "your ring turns to the right")],
)
def test_what_is_sent_past_our_own_functions_is_heard(answer, hint):
    """`tests/lib/test_record_torch_calls.py` tries the other functions of torch.distributed."""
    assert_told("02.3", answer, hint)


def even_ranks_first(x, k, group):
    dst, src = (group.rank + k) % group.size, (group.rank - k) % group.size
    if dst == group.rank:
        return x
    got = torch.empty_like(x)
    if group.rank % 2 == 0:
        dist.send(x, dst)
    dist.recv(got, src)
    if group.rank % 2 == 1:
        dist.send(x, dst)
    return got


def every_third_rank_first(x, k, group):
    if k % group.size == 0:
        return x
    dst, src = (group.rank + k) % group.size, (group.rank - k) % group.size
    if group.rank % 3 == 0:
        comm.send(x, group, dst).wait()
        return comm.recv(x, group, src).wait()
    got = comm.recv(x, group, src).wait()
    comm.send(x, group, dst).wait()
    return got


def of_my_length(x):
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    return torch.cat(shards)


@pytest.mark.thorough("hangs are waited for", keep=1)
@pytest.mark.parametrize(
    ("exercise_id", "answer", "words", "without"),
    [
        (
            "02.1",
            even_ranks_first,
            ["Parity does not", "the cycle: 0 waits for 2", "in even_ranks_first"],
            "Rank 0 rec",
        ),
        ("02.1", every_third_rank_first, ["0 and 3 wait for each other", "in every_third_rank_first"], "Parity"),
        ("02.4", of_my_length, ["disagree", "all_gather float64[", "in of_my_length"], "cut"),
    ],
)
def test_a_hang_that_is_known_has_its_hint_and_its_report(exercise_id, answer, words, without):
    """A wrong program hangs in the same calls, by whatever function they are made; otherwise there is only a report."""
    assert without not in assert_told(exercise_id, answer, *words)


@pytest.mark.thorough("looks at all tensors after each operation")
def test_the_peak_of_05_6_is_what_is_measured():
    """An answer may come near either; so the formula must be near what is measured.

    A message that is late on a busy machine keeps its buffer longer, so the least of three runs counts.
    """
    for sizes in ((2880,) * 5, (2880, 960, 15360, 960, 2880), (960, 2880, 15360)):
        for n in (3, 4):
            least = min(run(measured, n, sizes)[0] for _ in range(3))
            assert abs(least / peak_bytes(list(sizes), n) - 1) < 0.01


def test_a_number_that_is_no_float_is_itself():
    assert known_number(10**400, [1.0]) == 10**400 and known_number(torch.ones(2), [1.0]).tolist() == [1, 1]
