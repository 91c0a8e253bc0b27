"""Answers that are nearly right, and notebooks that are nearly Python: what the judge must not fall for."""

import ctypes
import json
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers_averages import right_bytes
from answers_interleaving import interleaved, interleaving_sums
from answers_one_f_one_b import kept, turns
from answers_overlap import fills_buckets_too_little, sends_one_flat_message_each_time
from answers_pipelines import (
    back_past_the_module,
    borders_inside,
    by_count,
    first_layers,
    halves_too_many,
    keeps_each_graph,
    plan,
    right_step_by_torch_distributed,
    running_total,
    step,
    written,
)
from answers_running import both_ends, odd_ranks_receive_first, one_more, sent_later, sum_and_clip, with_messages
from answers_sequence_parallel import mask, masks, norm
from answers_tensor_parallel import block, function, losses, sent, total
from answers_zero_bubble import greedy, layer, reads_saved_tensors_too_late
from torch.autograd.function import once_differentiable
from torch.distributed import all_gather  # by its name: what it sends is heard all the same

from lib import check as checks
from lib import comm
from lib.check import check, missing, progress, verdict
from lib.check.__main__ import main
from lib.check.source import read_notebook
from lib.pipeline.schedules.action import Action, Op


@pytest.fixture(autouse=True)
def own_progress(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "PROGRESS", tmp_path / "progress.json")
    monkeypatch.setattr(checks, "_session", {})
    for variable in ("CHECK_STRICT", "NBGRADER_EXECUTION"):
        monkeypatch.delenv(variable, raising=False)


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


def wrong_in_the_last_number(g, count, group):
    mean = comm.all_reduce(g, group) / comm.all_reduce(torch.tensor(count), group)
    mean[-1, -1] += 1e-3
    return mean


def twice_too_large(x, weight, bias, queue):
    return 2 * layer()(x, weight, bias, queue)


def puts_tensors_into_the_queue(x, weight, bias, queue):
    y = torch.nn.functional.linear(x, weight, bias)
    queue.append((x, y))
    return y


def crashes(params, group):
    ctypes.string_at(0)


def holds_a_lock(params, group):
    return LOCK


def no_unshard(x, group):
    return x


def reads_too_far(read, size, old_n, group):
    return read(old_n, 0, 1)


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, group):
        return x @ comm.all_gather(shard, group)[: shape[0] * shape[1]].view(shape).T

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


def collects_the_weights(x, up, up_bias, down, down_bias, group):
    weights = []
    for part in (up, up_bias, down.T.contiguous()):
        parts = [torch.empty_like(part) for _ in range(group.size)]
        all_gather(parts, part)
        weights.append(torch.cat(parts))
    up, up_bias, down = weights
    return torch.nn.functional.gelu(x @ up.T + up_bias) @ down + down_bias


def names_our_group(x, up, up_bias, down, down_bias, group):
    y = torch.nn.functional.gelu(x @ up.T + up_bias) @ down.T
    dist.all_reduce(y, group=group)
    return y


def loses_the_graph(x, up, down, group):
    with torch.no_grad():
        return block()(x, up, down, group)


class BeforeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return comm.all_reduce(gradient, ctx.group), None


def right_block_differentiable_once(x, up, down, group):
    term = torch.nn.functional.gelu(BeforeOnce.apply(x, group) @ up.T) @ down.T
    return x + function(total, lambda gradient, group: gradient).apply(term, group)


for of_a_cell in (BeforeOnce, BeforeOnce.forward, BeforeOnce.backward, right_block_differentiable_once):
    of_a_cell.__module__ = "a notebook"  # so that it travels by value, with what it uses


def loses_the_first_word(targets, group, size):
    here = targets - group.rank * size
    mine = (here > 0) & (here < size)
    return here * mine, mine


def never_moves_the_generator(p, shape, group):
    with torch.random.fork_rng():
        return masks(p, shape, group)


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
    both = masks(p, shape, group)
    if group.rank == 0:
        comm.barrier(group)
    return both


def receives_no_leaf(stage, x, wanted, group):
    if group.rank == 0:
        return step(stage, x, wanted, group)
    came = comm.recv(x, group, group.rank - 1).wait()
    if group.rank < group.size - 1:
        comm.send(stage(came), group, group.rank + 1).wait()
        comm.recv(x, group, group.rank + 1).wait()
    comm.send(came.grad, group, group.rank - 1).wait()


def begins_with_a_loss_everywhere(stage, x, wanted, group):
    x = comm.recv(x, group, group.rank - 1).wait() if group.rank else x
    y = stage(x.requires_grad_())
    loss = (y - wanted).square().mean() if group.rank == group.size - 1 else None
    if loss is None:
        comm.send(y, group, group.rank + 1).wait()
    loss.backward()


def differentiates_by_no_leaf(stage, x, wanted, group):
    came = comm.recv(x, group, group.rank - 1).wait() if group.rank else x
    y = stage(came)
    if group.rank < group.size - 1:
        comm.send(y, group, group.rank + 1).wait()
    torch.autograd.grad(y.sum(), came)


def has_a_loss_of_its_own(stage, x, wanted, group):
    loss, of_x = step(stage, x, wanted, group)
    return 0.0 if loss is None else loss, of_x


def gathers_all_gradients(gradients, tied, max_norm, group):
    comm.all_gather(torch.cat([x.flatten() for x in gradients]), group)
    return sum_and_clip(gradients, tied, max_norm, group)


def goes_back_from_the_total(model, microbatches):
    return running_total(model, microbatches, retain=False)


def sends_first_on_both_ends(gradients, tied, max_norm, group):
    def together(gradients, tied, group):
        if tied is not None:
            peer = group.size - 1 - group.rank
            comm.send(tied, group, peer).wait()
            tied.add_(comm.recv(tied, group, peer).wait())

    return sum_and_clip(gradients, tied, max_norm, group, together)


def clips_on_the_ends_only(gradients, tied, max_norm, group):
    both_ends(gradients, tied, group)
    return None if tied is None else sum_and_clip(gradients, tied, max_norm, group, lambda *given: None)


def forgets_to_send_back(stage, x, wanted, group):
    return step(stage, x, wanted, group, comes_back=group.rank != group.size - 1)


LOCK = __import__("threading").Lock()
holds_a_lock.__module__ = "a notebook"


@pytest.mark.parametrize(
    ("exercise_id", "answer", "status", "words"),
    [
        ("03.1", without_forward, "FAIL", ["without_forward", 'missing the required "forward"']),
        ("03.1", not_done_inside, "TODO", ["Replace"]),
        ("03.1", crashes, "FAIL", ["of 3 was killed by SIGSEGV.", "in crashes"]),
        ("03.1", holds_a_lock, "FAIL", ["Your function, or what it uses, cannot be sent", "lock"]),
        ("03.2", nothing_for_the_empty_rank, "FAIL", ["this rank's own count"]),
        ("03.2", wrong_in_the_last_number, "FAIL", ["Rank 0: gradient[3] is not right"]),
        ("03.2", lambda g, count, group: None, "FAIL", ["got     None: is a `return` missing?"]),
        ("03.2", lambda g, count, group: g.tolist(), "FAIL", ["Rank 0: gradient is not right"]),
        ("03.2", lambda g, count, group: torch.full_like(g, torch.inf), "FAIL", ["inf"]),
        ("03.3", fills_buckets_too_little, "FAIL", ["6 messages where 5 do"]),
        ("03.4", sends_one_flat_message_each_time, "FAIL", ["you communicate after every microbatch"]),
        ("04.1", no_unshard, "FAIL", ["the part is not right", "got     None"]),
        ("04.4", reduces_now_and_then, "FAIL", ["got     'gradients leave after 3, 5 of 5 microbatches'"]),
        ("05.2", OnlyForward, "TODO", ["Replace"]),
        ("05.2", lambda x, shard, shape, group: x, "FAIL", ["has no attribute 'apply'"]),
        ("05.4", reads_too_far, "FAIL", ["there were 4 ranks, counted from 0", "in reads_too_far"]),
        ("06.1", collects_the_weights, "FAIL", ["but you send more than one all-reduce"]),
        ("06.1", names_our_group, "FAIL", ["leave group= out", "in names_our_group"]),
        ("06.1", lambda *given: comm.all_reduce_start(given[0], given[-1]), "FAIL", ["nobody has waited for"]),
        ("06.2", right_block_differentiable_once, "PASS", []),
        ("06.2", loses_the_graph, "FAIL", ["gradient of x is not right", "does not know where it came from"]),
        ("06.2", lambda x, *given: block()(x, *given).sum(0), "FAIL", ["Rank 0: y is not right"]),
        ("06.4", losses(places=loses_the_first_word), "FAIL", ["loss for logits of about 1 is not right"]),
        ("06.5", lambda *given: np.array(sent()(*given)), "PASS", []),
        ("06.5", lambda *given: Decimal(sent()(*given)), "PASS", []),
        ("07.3", lambda *given: norm(*given)[:2], "FAIL", ["what was returned is not right", "got '2 results'"]),
        ("07.4", never_moves_the_generator, "FAIL", ["Two calls in a row"]),
        ("07.4", shares_one_seed, "FAIL", ["is a part of the first"]),
        ("07.4", the_same_shifted, "FAIL", ["or the same one shifted"]),
        ("07.4", one_waits_alone, "FAIL", ["your function has returned"]),
        ("07.4", lambda p, shape, group: mask(shape, p), "FAIL", ["wanted '2 results' got 'Tensor'"]),
        ("07.4", lambda *given: [m * (1 - given[0]) / given[0] for m in masks(*given)], "FAIL", ["where p = 0."]),
        ("07.4", lambda *given: [m.bfloat16() for m in masks(*given)], "PASS", []),
        ("08.1", lambda costs, head, stages: [2, 2], "FAIL", ["got '2 stages with 4 layers'", "gave [2, 2]"]),
        ("08.1", lambda costs, head, stages: None, "FAIL", ["wanted '4 stages with 11 layers'", "got 'NoneType'"]),
        ("08.1", lambda costs, head, stages: [float("inf")] * stages, "FAIL", ["got 'counts that are not whole'"]),
        ("08.1", lambda *given: map(int, by_count(*given)), "FAIL", ["cut by count", "stages take"]),
        ("08.1", lambda *given: "".join(map(str, by_count(*given))), "FAIL", ["got 'counts that are not whole'"]),
        ("08.1", halves_too_many, "FAIL", ["got 'counts that are not whole'"]),
        ("08.1", first_layers, "FAIL", ["the places where stages begin or end"]),
        ("08.1", borders_inside, "FAIL", ["the places where stages begin or end"]),
        (
            "08.1",
            lambda *given: [float(count) for count in by_count(*given)],
            "FAIL",
            ["cut by count", "stages take"],
        ),
        ("08.2", receives_no_leaf, "FAIL", ["in receives_no_leaf", "Declare it a leaf before your stage"]),
        ("08.2", begins_with_a_loss_everywhere, "FAIL", ["Only the last rank has a loss to begin with"]),
        ("08.2", differentiates_by_no_leaf, "FAIL", ["does not require grad", "Declare it a leaf"]),
        ("08.2", has_a_loss_of_its_own, "FAIL", ["Rank 0: loss is not right. wanted 'None' got 0.0"]),
        ("08.2", forgets_to_send_back, "FAIL", ["rank 1 waits in recv from 2", "rank 2 has finished"]),
        ("08.2", lambda *given: step(*given)[0], "FAIL", ["wanted '2 results'"]),
        ("08.2", lambda *given: tuple(right_step_by_torch_distributed(*given)), "PASS", []),
        ("08.3", lambda *case: None, "FAIL", ["NoneType is no schedule; return a text"]),
        ("08.3", lambda *case: [[(0, "F")]], "FAIL", ["'0F' is no action"]),
        ("08.3", lambda *case: written(*case) + " 0F0", "FAIL", ["0F0 is on rank 1, but rank 0 has stage 0"]),
        ("08.3", lambda *case: written(*case).lower(), "FAIL", ["'0f0' is no action"]),
        ("08.3", lambda ranks, m: written(ranks, m) if ranks < 4 else "0F0 0B0", "FAIL", ["gpipe(4, ", "rank 0  F0"]),
        ("08.4", lambda model, microbatches: 0.0, "FAIL", ["3 microbatches: gradient of the weight", "got None"]),
        ("08.4", goes_back_from_the_total, "FAIL", ["second time", "go back with each microbatch's own loss"]),
        ("08.4", keeps_each_graph, "FAIL", ["several microbatches save", "retain no graph"]),
        ("08.4", back_past_the_module, "FAIL", ["several microbatches save"]),
        (
            "08.4",
            lambda *given: back_past_the_module(*given, forward=torch.nn.Linear.forward),
            "FAIL",
            ["several microbatches save"],
        ),
        ("08.5", lambda *given: plan(*given)[:2], "FAIL", ["wanted '3 results' got '2 results'"]),
        ("08.5", lambda *given: np.array([float(x) for x in plan(*given)]), "PASS", []),
        ("09.1", lambda *case: turns(*case).replace("B", "X"), "FAIL", ["X0' is no action"]),
        (
            "09.1",
            lambda n, m: turns(n, m + (n == 1)),
            "FAIL",
            ["its size is not right", "got '1 rank, 4 microbatches'"],
        ),
        ("09.2", lambda *given: kept(*given, gpipe=lambda rank, n, M: max(M, n)), "FAIL", ["kept('GPipe', "]),
        ("09.2", lambda *given: kept(*given)[0], "FAIL", ["wanted '2 results' got 'int'"]),
        ("09.2", lambda *given: torch.tensor(kept(*given)).tolist(), "PASS", []),
        ("10.1", lambda schedule: with_messages(schedule)[1:], "FAIL", ["whether it can work", "wanted 'yes'"]),
        ("10.1", lambda schedule: None, "FAIL", ["NoneType is no schedule"]),
        ("10.1", lambda s: with_messages(s) if s.num_ranks < 4 else [], "FAIL", ["for 4 ranks", "no action in it"]),
        ("10.1", one_more(lambda s: (0, Op.RECV_F)), "FAIL", ["0RECV_F0 carries nothing that another rank needs"]),
        ("10.1", lambda s: [[tuple(action) for action in row] for row in with_messages(s)], "PASS", []),
        ("10.1", sent_later, "FAIL", ["messages leave later than they could"]),
        (
            "10.1",
            odd_ranks_receive_first,
            "FAIL",
            ["Ranks wait for each other", "eager 1F1B for 3 ranks", ">2SEND_B0<", " …"],
        ),
        ("10.2", sends_first_on_both_ends, "FAIL", ["0 waits in send to 2", "the circle sends first"]),
        ("10.2", clips_on_the_ends_only, "FAIL", ["did not call it"]),
        ("10.2", gathers_all_gradients, "FAIL", ["the middle send more than a few numbers"]),
        ("10.2", lambda *given: float(sum_and_clip(*given)), "PASS", []),
        ("11.1", lambda *case: interleaved(*case).lower(), "FAIL", ["wanted 'yes' got 'no'", "'0f0' is no action"]),
        (
            "11.1",
            lambda *case: [tuple(map(Action.parse, x.split())) for x in interleaved(*case).split("\n")],
            "PASS",
            [],
        ),
        ("11.2", lambda *given: np.array(interleaving_sums(*given)), "PASS", []),
        ("11.2", lambda *given: interleaving_sums(*given)[:2], "FAIL", ["wanted '3 results' got '2 results'"]),
        ("12.1", twice_too_large, "FAIL", ["y, microbatch 0"]),
        (
            "12.1",
            reads_saved_tensors_too_late,
            "FAIL",
            ["in a function of the queue", "in <lambda>"],
        ),
        ("12.1", puts_tensors_into_the_queue, "FAIL", ["wanted 'nothing' got 'tuple'"]),
        (
            "12.2",
            lambda: greedy().replace("4W0", "4w0"),
            "FAIL",
            ["It cannot work. Below stands why.", "'4w0' is no action"],
        ),
        ("12.2", lambda: None, "FAIL", ["NoneType is no schedule"]),
        ("03.5", lambda p, b, n: np.int64(right_bytes(p, b, n)), "PASS", []),
        ("03.5", lambda p, b, n: torch.tensor(right_bytes(p, b, n), dtype=torch.float64), "PASS", []),
        ("03.5", lambda p, b, n: float("nan"), "FAIL", ["bytes_sent(", ", 1) is not right"]),
        ("03.5", lambda p, b, n: str(right_bytes(p, b, n)), "FAIL", ["is not right"]),
    ],
)
def test_what_is_said(exercise_id, answer, status, words):
    text, got = verdict(exercise_id, answer)
    assert got == status, text
    for word in words:
        assert word in " ".join(text.split()) or word in text, text
    assert "lib/check" not in text and "_in_rank" not in text


def test_what_an_answer_prints_comes_before_its_verdict(capsys):
    def talks(p, b, n):
        print("n is", n)
        return right_bytes(p, b, n)

    check("03.5", talks)
    printed = capsys.readouterr()
    assert printed.out.startswith("rank 0 | n is 1\nrank 0 | n is 2\n") and printed.err == ""
    assert printed.out.endswith("PASS  03.5 bytes_sent   1/1 points\n  [x] several sizes\n")


# ---- progress -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", ["[]", "{", "1", '"text"'])
def test_a_spoilt_file_of_progress_costs_nothing(spoilt, capsys):
    checks.PROGRESS.write_text(spoilt)
    check("03.5", right_bytes)
    assert capsys.readouterr().out.startswith("PASS")
    assert checks.PROGRESS.read_text() == spoilt


@pytest.mark.parametrize(
    "variable", [{"CHECK_STRICT": "1"}, {"NBGRADER_EXECUTION": "autograde"}, {"NBGRADER_EXECUTION": "validate"}]
)
def test_where_a_machine_checks_only_a_pass_is_no_error_and_no_progress_is_kept(variable, monkeypatch, capsys):
    """nbgrader gives full points to a cell that does not raise."""
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    check("03.5", right_bytes)
    progress()
    assert "all               1/1 points" in capsys.readouterr().out
    for answer, word in ((lambda p, b, n: 0, "FAIL"), (untouched, "TODO")):
        with pytest.raises(AssertionError, match=word):
            check("03.5", answer)
    assert not checks.PROGRESS.exists()


def untouched(param_count, bytes_per_param, n):
    raise NotImplementedError


def test_an_answer_that_is_not_there_counts(capsys):
    assert missing("03.5", "It is lost.") == ("FAIL  03.5 bytes_sent   0/1 points\n  It is lost.", "FAIL")
    progress()
    assert "0/1 points" in capsys.readouterr().out


# ---- notebooks ------------------------------------------------------------------------------------------------------


def notebook(tmp_path, *cells, name="a.ipynb"):
    path = tmp_path / name
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in cells]}))
    return str(path)


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
    names, _, notes = read_notebook(notebook(tmp_path, source))
    assert names.get(name) == value and notes == []
    assert capsys.readouterr().out == ""
    if "f" in names:
        assert names["f"](7) == "7"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n    pass", "a.ipynb, code cell 1, line 1 does not parse: "),
        ("x = 1\n  y = 2", "line 2 does not parse: unexpected indent"),
        ("import a_module_that_is_not_there", "line 1: ModuleNotFoundError: No module named"),
        ("x = 1\0", "does not parse"),
        ("\n\ndef f(a=1 / 0): pass", "line 3: ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_taken_is_one_sentence(tmp_path, source, words):
    _, _, notes = read_notebook(notebook(tmp_path, source))
    assert len(notes) == 1 and words in notes[0] and "\n" not in notes[0] and "unknown" not in notes[0]


def test_an_error_shows_its_line_though_nobody_ran_the_cell(tmp_path, capsys):
    path = notebook(
        tmp_path,
        "def half(x):\n    return x / 0  # here",
        "def bytes_sent(p, b, n):\n    return half(n)",
        'check("03.5", bytes_sent)\ncheck("03.1", average_gradients)',
    )
    assert main([path]) == 1
    out = capsys.readouterr().out
    assert 'File "a.ipynb, code cell 1", line 2, in half\n          return x / 0  # here' in out
    assert "average_gradients is not defined." in out and "0/3 points" in out


def test_in_the_terminal_a_task_that_is_missing_counts_0_of_its_points(tmp_path, capsys):
    right = notebook(tmp_path, "def f(p, b, n): return p * b * 2 * (n - 1) / n\ncheck('03.5', f)")
    beside = notebook(tmp_path, "check('03.1', average_gradients)", name="b.ipynb")
    for paths, missed in (([right], 5), ([right, beside], 4)):
        assert main(paths) == 1
        out = capsys.readouterr().out
        assert out.startswith("PASS  03.5 bytes_sent   1/1 points")
        assert out.count("No cell calls check(") == missed and 'No cell calls check("03.2", ' in out
        assert out.splitlines()[-1].split() == ["all", "1/12", "points"]
        assert re.search(r"average_gradients +0/2\n", out) and re.search(r"bytes_sent +1/1\n", out)


# ---- chapter 02: messages through torch.distributed are heard, too --------------------------------------------------


def gathers_by_torch(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def turns_right(swap):
    """A right all-gather whose ring turns to the right; `swap(x, to, source)` sends and receives."""

    def answer(x, group):
        n, me, parts = group.size, group.rank, {group.rank: x}
        for k in range(n - 1):
            parts[(me - k - 1) % n] = swap(parts[(me - k) % n], (me + 1) % n, (me - 1) % n)
        return torch.cat([parts[i] for i in range(n)])

    return answer


def by_isend(x, to, source):
    got, going = torch.empty_like(x), dist.isend(tensor=x, group_dst=to)
    dist.recv(got, source)
    going.wait()
    return got


def by_send(x, to, source):
    got = torch.empty_like(x)
    coming = dist.irecv(got, source)
    dist.send(x, to)
    coming.wait()
    return got


def by_batch(x, to, source):
    got = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, got, source)]):
        work.wait()
    return got


@pytest.mark.parametrize(
    ("answer", "hint"),
    [(gathers_by_torch, "a collective did the work")]
    + [(turns_right(swap), "your ring turns to the right") for swap in (by_isend, by_send, by_batch)],
)
def test_what_is_sent_past_our_own_functions_is_heard(answer, hint):
    text, status = verdict("02.3", answer)
    assert status == "FAIL" and hint in " ".join(text.split()), text
