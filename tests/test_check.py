"""Each named mistake is made here once, and must be recognised; different right answers must pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lib import check as checks
from lib import comm
from lib.check import EXERCISES, check, find, progress, verdict
from lib.check.exercise import same
from lib.check.judge import judge
from lib.check.source import NotebookError, read

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def own_progress(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "PROGRESS", tmp_path / "progress.json")
    monkeypatch.setattr(checks, "_session", {})


# ---- answers: the first word of each name says what to expect -------------------------------------------------------


def each(params, make):
    for p in params:
        if p.grad is not None:
            p.grad = make(p)


def right_average(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group, op="mean"))


def right_average_by_torch_distributed(params, group):
    for p in params:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def right_average_in_one_message(params, group):
    grads = [p.grad for p in params if p.grad is not None]
    flat = comm.all_reduce(torch.cat([g.flatten() for g in grads]), group) / group.size
    for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(piece.view_as(g))


def sums(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group))


def divides_twice(params, group):
    each(params, lambda p: comm.all_reduce(p.grad, group, op="mean") / group.size)


def forgets_to_assign(params, group):
    each(params, lambda p: (comm.all_reduce(p.grad, group, op="mean"), p.grad)[1])


def broadcasts(params, group):
    each(params, lambda p: comm.broadcast(p.grad, group, src=0))


def writes_into_weights(params, group):
    for p in params:
        if p.grad is not None:
            p.data = comm.all_reduce(p.grad, group, op="mean")


def averages_weights(params, group):
    for p in params:
        p.data = comm.all_reduce(p.data, group, op="mean")


def trains_the_frozen(params, group):
    for p in params:
        p.grad = comm.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, group, op="mean").detach()


def right_global(g, count, group):
    return comm.all_reduce(g, group) / comm.all_reduce(torch.tensor(count), group)


def right_global_by_weights(g, count, group):
    share = count / comm.all_gather(torch.tensor([float(count)], dtype=torch.float64), group).sum()
    return comm.all_reduce(g / max(count, 1) * share, group)


def mean_of_means(g, count, group):
    return comm.all_reduce(g / max(count, 1), group, op="mean")


def nan_of_means(g, count, group):
    return comm.all_reduce(g / count, group, op="mean")


def sum_of_means(g, count, group):
    return comm.all_reduce(g / max(count, 1), group)


def mean_count(g, count, group):
    return comm.all_reduce(g, group) / comm.all_reduce(torch.tensor(float(count)), group, op="mean")


def mean_of_sums(g, count, group):
    return comm.all_reduce(g, group, op="mean") / comm.all_reduce(torch.tensor(count), group)


def own_count(g, count, group):
    return comm.all_reduce(g, group) / max(count, 1)


def own_count_times_ranks(g, count, group):
    return comm.all_reduce(g, group) / (count * group.size)


def own_mean(g, count, group):
    return g / max(count, 1)


def undivided(g, count, group):
    return comm.all_reduce(g, group)


def in_buckets(
    gradients,
    bucket_bytes,
    group,
    op="mean",
    last="sent",
    when="full",
    wait="end",
    room=None,
    start=comm.all_reduce_start,
):
    """The answer to 03.3, with a place for each mistake."""
    if when == "end":
        gradients = iter(list(gradients))
    room = bucket_bytes if room is None else room
    done, bucket, held = [], [], 0

    def send():
        nonlocal bucket, held
        pending = start(torch.cat([g.flatten() for g in bucket]), group, op=op)
        if wait == "at once":
            pending.wait()
        done.append((bucket, pending))
        bucket, held = [], 0

    for g in gradients:
        size = g.numel() * 8
        if bucket and held + size > room and when != "overrun":
            send()
        bucket.append(g)
        held += size
        if held >= room and when != "lazy":
            send()
    if bucket and last == "sent":
        send()
    out = []
    for sent, pending in done:
        out += [x.view_as(g) for x, g in zip(pending.wait().split([g.numel() for g in sent]), sent, strict=True)]
    return out + (bucket if last == "own" else [])


def right_buckets(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group)


def right_buckets_lazily(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, when="lazy")


def right_buckets_by_torch_distributed(gradients, bucket_bytes, group):
    class Started:
        def __init__(self, flat):
            self.flat, self.work = flat, dist.all_reduce(flat, async_op=True)

        def wait(self):
            self.work.wait()
            return self.flat / dist.get_world_size()

    return in_buckets(gradients, bucket_bytes, group, start=lambda flat, group, op: Started(flat))


def at_the_end(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, when="end")


def waits_at_once(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, wait="at once")


def one_each(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, room=1)


def overruns(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, when="overrun")


def forgets_to_return(gradients, bucket_bytes, group):
    in_buckets(gradients, bucket_bytes, group)


def drops_the_last(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, last="dropped")


def keeps_the_last(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, last="own")


def sums_buckets(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, op="sum")


def reverses(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group)[::-1]


def accumulate(model, microbatches, loss_fn, group, divide=1.0, op="mean", each_time=False):
    for i, (x, y) in enumerate(microbatches):
        (loss_fn(model(x), y) / divide).backward()
        if each_time or i == len(microbatches) - 1:
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, group, op=op)


def right_accumulate(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches))


def right_accumulate_in_one_message(model, microbatches, loss_fn, group):
    grads = None
    for x, y in microbatches:
        new = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
        grads = new if grads is None else [a + b for a, b in zip(grads, new, strict=True)]
    flat = comm.all_reduce(torch.cat([g.flatten() for g in grads]), group, op="mean") / len(microbatches)
    for p, piece in zip(model.parameters(), flat.split([g.numel() for g in grads]), strict=True):
        p.grad = piece.view_as(p)


def forgets_microbatches(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group)


def sums_ranks(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches), op="sum")


def divides_by_microbatches_twice(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches) ** 2)


def divides_by_nothing(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, op="sum")


def sends_each_time(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches), each_time=True)


def right_bytes(p, b, n):
    return 2 * (n - 1) / n * p * b


def right_bytes_in_two_halves(p, b, n):
    shard = p * b / n
    return (n - 1) * shard + (n - 1) * shard


def right_start(model, group):
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.copy_(comm.broadcast(x, group, src=0))


def right_start_by_torch_distributed(model, group):
    for x in model.state_dict().values():
        dist.broadcast(x, src=0)


def copies(model, tensors, of):
    with torch.no_grad():
        for x in tensors:
            x.copy_(of(x))


RIGHT = {
    "03.1": [right_average, right_average_by_torch_distributed, right_average_in_one_message],
    "03.2": [right_global, right_global_by_weights],
    "03.3": [right_buckets, right_buckets_lazily, right_buckets_by_torch_distributed],
    "03.4": [right_accumulate, right_accumulate_in_one_message],
    "03.5": [right_bytes, right_bytes_in_two_halves],
    "03.6": [right_start, right_start_by_torch_distributed],
}
WRONG = {  # in the order of the exercise's mistakes
    "03.1": [
        *(sums, divides_twice, forgets_to_assign, broadcasts),
        *(writes_into_weights, averages_weights, trains_the_frozen),
    ],
    "03.2": [
        *(mean_of_means, nan_of_means, sum_of_means, mean_count, mean_of_sums),
        *(own_count, own_count_times_ranks, own_mean, undivided),
    ],
    "03.3": [at_the_end, waits_at_once, one_each, overruns, drops_the_last, keeps_the_last, sums_buckets, reverses],
    "03.4": [forgets_microbatches, sums_ranks, divides_by_microbatches_twice, divides_by_nothing, sends_each_time],
    "03.5": [
        lambda p, b, n: (n - 1) / n * p * b,
        lambda p, b, n: 2 * (n - 1) * p * b,
        lambda p, b, n: 4 * (n - 1) / n * p * b,
        lambda p, b, n: 16 * (n - 1) / n * p * b,
        lambda p, b, n: 2 * p * b,
        lambda p, b, n: (n - 1) * p * b,
    ],
    "03.6": [
        lambda model, group: [comm.broadcast(p, group) for p in model.parameters()],
        lambda model, group: copies(model, model.parameters(), lambda x: comm.broadcast(x, group)),
        lambda model, group: copies(model, model.parameters(), lambda x: comm.all_reduce(x, group, op="mean")),
        lambda model, group: copies(
            model, (*model.parameters(), *model.buffers()), lambda x: comm.broadcast(x, group, src=group.size - 1)
        ),
        lambda model, group: copies(
            model,
            (*(p for p in model.parameters() if p.requires_grad), *model.buffers()),
            lambda x: comm.broadcast(x, group),
        ),
    ],
}


@pytest.mark.parametrize("exercise_id", sorted(EXERCISES))
def test_right_answers_pass(exercise_id):
    assert len(RIGHT[exercise_id]) >= 2
    for answer in RIGHT[exercise_id]:
        text, status = verdict(exercise_id, answer)
        assert status == "PASS", text
        assert "[ ]" not in text and "seed" not in text


@pytest.mark.parametrize("exercise_id", sorted(EXERCISES))
def test_each_mistake_is_named(exercise_id):
    mistakes = EXERCISES[exercise_id].mistakes
    assert len(mistakes) >= 3 and len(WRONG[exercise_id]) == len(mistakes)
    for answer, mistake in zip(WRONG[exercise_id], mistakes, strict=True):
        cases = judge(EXERCISES[exercise_id], answer, seed=3)
        hints = [" ".join(case.hint.split()) for case in cases]
        assert [case.status for case in cases] == ["FAIL"] * len(cases)
        # A mistake that takes a rank without samples is another mistake where all have some.
        assert set(hints) <= {m.hint for m in mistakes} and hints[-1] == mistake.hint, hints


@pytest.mark.parametrize("exercise_id", sorted(EXERCISES))
def test_mistakes_differ_from_the_answer_and_from_each_other(exercise_id):
    exercise = EXERCISES[exercise_id]
    for ranks in exercise.ranks:
        given = exercise.inputs(torch.Generator().manual_seed(7), ranks)
        wanted = exercise.reference(given)
        looks = [m.answers(given, wanted) for m in exercise.mistakes]
        for i, one in enumerate(looks):
            # Where a mistake speaks of other entries than the answer, those must not be there in the right one.
            assert not all(same(w, o) for w, o in zip(wanted, one, strict=True)), exercise.mistakes[i].hint
            for j, other in enumerate(looks):
                if i != j and one[0].keys() == other[0].keys():
                    equal = all(same(a, b) and same(b, a) for a, b in zip(one, other, strict=True))
                    assert not equal, (exercise.mistakes[i].hint, exercise.mistakes[j].hint)


def test_inputs_are_fresh_and_a_seed_brings_them_back():
    exercise = find("03.1")
    first, again = (exercise.inputs(torch.Generator().manual_seed(1), 3) for _ in range(2))
    other = exercise.inputs(torch.Generator().manual_seed(2), 3)
    assert same(first[0], again[0]) and not same(first[0], other[0])
    seen = []

    def unlike_any(params, group):
        each(params, lambda p: p.grad + 1)

    for seed in (5, 5, None, None):
        seen.append(verdict("03.1", unlike_any, seed)[0])
    assert seen[0] == seen[1] and seen[2] != seen[3]
    assert "seed=5)" in seen[0] and "wanted" in seen[0] and "got" in seen[0]


# ---- what else can happen to an answer ------------------------------------------------------------------------------


def not_done(params, group):
    raise NotImplementedError


def raises(params, group):
    nothing = {}
    return nothing["the key"]


def hangs(params, group):
    if group.rank == 0:
        comm.all_reduce(params[0].grad, group)


def sends_first(params, group):
    comm.send(params[0].grad, group, dst=(group.rank + 1) % group.size).wait()


def mismatched(params, group):
    comm.all_reduce(params[0].grad[group.rank % 2 :], group)


def leaves(params, group):
    os._exit(0)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (not_done, "TODO", ["Replace `raise NotImplementedError`"]),
        (raises, "FAIL", ["KeyError: 'the key'", "test_check.py", "in raises"]),
        (hangs, "FAIL", ["rank 0  waits in all_reduce", "did not call it", "the same collective calls"]),
        (sends_first, "FAIL", ["waits in send to 1", "the circle", "Every rank sends first"]),
        (mismatched, "FAIL", ["disagree", "[3, 4]", "[2, 4]"]),
        (leaves, "FAIL", ["left without returning"]),
    ],
)
def test_what_is_said(answer, status, words):
    text, got = verdict("03.1", answer)
    assert got == status
    for word in words:
        assert word in text, text
    assert "lib/check" not in text


def test_endless_loop(monkeypatch):
    def forever(params, group):
        while True:
            pass

    import dataclasses

    monkeypatch.setitem(EXERCISES, "03.1", dataclasses.replace(EXERCISES["03.1"], timeout_s=1, ranks=(3,)))
    text, status = verdict("03.1", forever)
    assert status == "FAIL" and "endless loop" in text and "in forever" in text


def test_a_missing_return_is_told():
    text, status = verdict("03.3", forgets_to_return)
    assert status == "FAIL" and "is a `return` missing?" in text


def test_todo_does_not_cost_points_that_were_kept(capsys):
    check("03.5", right_bytes)
    check("03.5", lambda p, b, n: not_done(None, None))
    assert json.loads(checks.PROGRESS.read_text())["03.5"]["points"] == 1


def test_partial_credit():
    def only_with_three(params, group):
        (right_average if group.size == 3 else sums)(params, group)

    text, status = verdict("03.1", only_with_three)
    assert status == "FAIL" and "1/2 points" in text and "[x] 3 ranks" in text and "[ ] 4 ranks" in text


def test_wrong_use():
    with pytest.raises(ValueError, match=r"there is no exercise '03\.11'; did you mean '03\.1'"):
        check("03.11", right_average)
    with pytest.raises(ValueError, match=r"there are 03\.1, 03\.2"):
        check("xyz", right_average)
    with pytest.raises(TypeError, match="needs your function average_gradients, not int"):
        check("03.1", 3)


def test_what_check_prints(capsys, monkeypatch):
    monkeypatch.delenv("CHECK_STRICT", raising=False)
    assert check("03.5", right_bytes) is None
    assert check("03.5", lambda p, b, n: 0) is None
    printed = capsys.readouterr()
    assert printed.out.startswith(
        "PASS  03.5 bytes_sent   1/1 points\n  [x] several sizes\nFAIL  03.5 bytes_sent   0/1"
    )
    assert printed.err == ""
    progress()
    assert capsys.readouterr().out == "03.5  bytes_sent  0/1\nall               0/1 points\n"
    assert json.loads(checks.PROGRESS.read_text())["03.5"]["max"] == 1
    monkeypatch.setenv("CHECK_STRICT", "1")
    with pytest.raises(AssertionError, match="FAIL"):
        check("03.5", lambda p, b, n: 0)


# ---- from a file ----------------------------------------------------------------------------------------------------


def notebook(tmp_path, *cells):
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in cells]}))
    return str(path)


def test_only_definitions_are_taken(tmp_path):
    names, found, notes = read(
        notebook(
            tmp_path,
            "import torch\nFACTOR = 2\nprint('no')\nx = open('/nowhere')\n%matplotlib inline\n!rm -rf /",
            "while True: pass",
            "def f(p, b, n):\n    return FACTOR * g(n) * p * b\ncheck('03.5', f)",
            "def g(n:\n  broken",
            "def g(n):\n    return (n - 1) / n",
        )
    )
    assert found == [("03.5", "f")] and names["f"](8, 1, 4) == 12
    assert "x" not in names and len(notes) == 1 and "code cell 4 does not parse" in notes[0]
    assert verdict("03.5", names["f"])[1] == "PASS"


def run_cli(*args):
    done = subprocess.run(
        [sys.executable, "-m", "lib.check", *map(str, args)], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_the_terminal_gives_the_same_verdicts(tmp_path):
    code, out, err = run_cli(ROOT / "solutions" / "03_data_parallelism.ipynb")
    assert (code, err) == (0, "") and out.count("PASS") == 6 and "12/12 points" in out
    code, out, err = run_cli(ROOT / "exercises" / "03_data_parallelism.ipynb")
    assert (code, err) == (1, "") and out.count("TODO") == 6 and "0/12 points" in out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "none.ipynb", "does not exist"),
        (lambda d: d, "is a folder"),
        (lambda d: (d / "x.ipynb", (d / "x.ipynb").write_bytes(b"\x00\xffabc"))[0], "not JSON"),
        (lambda d: (d / "y.ipynb", (d / "y.ipynb").write_text("[1, 2]"))[0], "no list of cells"),
        (lambda d: (d / "z.ipynb", (d / "z.ipynb").write_text("[" * 100_000))[0], "not JSON"),
    ],
)
def test_what_is_no_notebook(tmp_path, make, words):
    with pytest.raises(NotebookError, match=words):
        read(str(make(tmp_path)))


def test_bad_input_in_the_terminal_is_one_sentence(tmp_path):
    for path, words in (
        (tmp_path / "none.ipynb", "does not exist"),
        (notebook(tmp_path, "check('03.99', f)\ndef f(): pass"), "there is no exercise '03.99'"),
    ):
        code, out, err = run_cli(path)
        assert code == 2 and words in err and err.count("\n") == 1 and "Traceback" not in out + err
