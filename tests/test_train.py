"""The training loop: the same run whatever the layout, a report that adds up, and a command line that fails well."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from lib import cost, data, run
from lib import train as train_module
from lib.data_parallel.ddp import fill_buckets
from lib.launch import RankError
from lib.mesh import Group
from lib.model import GPT, GPTConfig
from lib.train import TrainConfig, main, train

TINY = GPTConfig(context=16, d_model=24, num_layers=3, num_heads=2)
CONFIG = TrainConfig(model=TINY, steps=4, global_batch=24, dtype="float64", validate_every=2, bucket_bytes=20_000)
FLAGS = (
    "--context 16 --d-model 24 --layers 3 --heads 2 --steps 4 --global-batch 24 --dtype float64 --validate-every 2"
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def serial():
    return train(Group(), CONFIG, quiet=True)


def same(a, b):
    return a["losses"] == pytest.approx(b["losses"], rel=1e-12) and [x for _, x in a["validation"]] == pytest.approx(
        [x for _, x in b["validation"]], rel=1e-12
    )


def flats_bytes(zero, n):
    """Bytes of what travels together, in float64, with zeros so that n ranks can share it out: buckets, or units."""
    model = GPT(TINY)
    flats = fill_buckets(list(model.double().parameters())[::-1], CONFIG.bucket_bytes)
    if zero == 3:
        blocks = [list(block.parameters()) for block in model.blocks]
        inside = {id(p) for block in blocks for p in block}
        flats = [[p for p in model.parameters() if id(p) not in inside], *blocks]
    share = n if zero else 1  # an all-reduce needs no even shares
    return [8 * share * math.ceil(sum(p.numel() for p in flat) / share) for flat in flats]


LAYOUTS = [(0, 1, 4), (0, 2, 1), (0, 2, 2), (0, 3, 1), (0, 4, 2)]
LAYOUTS += [(zero, dp, k) for zero in (1, 2, 3) for dp, k in ((1, 1), (2, 3), (3, 1), (4, 2))]


@pytest.mark.parametrize("zero, dp, microbatches", LAYOUTS)
def test_the_same_losses_whatever_the_layout(serial, zero, dp, microbatches):
    config = dataclasses.replace(CONFIG, zero=zero, dp=dp, microbatches=microbatches)
    reports = run(train, dp, config, True)
    assert len(serial["losses"]) == 4 and len(serial["validation"]) == 3
    assert serial["losses"] == sorted(serial["losses"], reverse=True)
    for report in reports:
        assert same(report, serial)
        assert report["losses"] == reports[0]["losses"]  # one number, not one for each rank
        assert len(report["step_s"]) == 4 and all(0 < x < 60 for x in report["step_s"])
        assert (report["config"]["zero"], report["config"]["dp"]) == (zero, dp)
        assert report["config"]["model"]["d_model"] == 24

    # What each rank sends in a step: each flat as often as its stage does that, the loss, and the norm of the shards.
    flats = flats_bytes(zero, dp)
    reductions = microbatches if zero >= 2 else 1
    calls = {"all_reduce dp": 1 + (1 if zero else len(flats))}
    if zero:
        calls["reduce_scatter dp"] = reductions * len(flats)
        calls["all_gather dp"] = len(flats) * (2 * microbatches if zero == 3 else 1)
    ideal = cost.zero_wire_bytes(zero, sum(flats), dp, microbatches=microbatches)
    ideal += cost.wire_bytes("all_reduce", 16 if zero else 8, dp)
    assert len(flats) >= 4
    for report in reports:
        assert {kind: number / 4 for kind, (number, _) in report["traffic"].items()} == (calls if dp > 1 else {})
        assert sum(sent for _, sent in report["traffic"].values()) == pytest.approx(4 * ideal, rel=1e-12)

    # And holds. Weights: all, or a shard, the root, two blocks, and the one number that stands in for the rest. Adam's
    # two moments (and a float32 step count for each piece). Gradients: all, or a shard and the largest flat that
    # fills (and the root's, from the head to the embedding); and one on its way into it.
    tensors = [p.numel() for p in GPT(TINY).parameters()]
    shard, psi = sum(flats) // dp, 8 * TINY.num_parameters
    on_its_way = 8 * max(tensors)
    filling = flats[0] + max(flats[1:]) if zero == 3 else max(flats)
    for report in reports:
        peak = report["peak_bytes"]
        assert peak["parameter"] == (shard + flats[0] + 2 * max(flats[1:]) + 8 if zero == 3 else sum(flats))
        if zero < 2:
            assert peak["gradient"] == sum(flats) + on_its_way
        else:
            assert shard <= peak["gradient"] <= shard + filling + on_its_way
        assert peak["optimizer"] <= 2 * (shard if zero else psi) + 4 * len(tensors)
        assert peak["activation"] > 0
        assert peak["total"] <= sum(peak[kind] for kind in peak if kind != "total")
        assert peak["total"] > 4 * psi - (2 * (psi - shard) if zero else 0) - (2 * psi if zero > 1 else 0)
    held = sum(report["peak_bytes"]["optimizer"] for report in reports)
    copies, cuts = (dp, 0) if zero == 0 else (1, (dp - 1) * len(flats))  # a cut makes two pieces of one parameter
    assert 0 <= held - copies * (2 * psi + 4 * len(tensors)) <= 4 * cuts


@pytest.mark.parametrize("dp, tp, sequence_parallel", [(1, 2, False), (1, 2, True), (2, 2, False), (2, 2, True)])
def test_the_same_losses_with_tensor_parallel_ranks(serial, dp, tp, sequence_parallel):
    config = dataclasses.replace(CONFIG, dp=dp, tp=tp, sequence_parallel=sequence_parallel, microbatches=2)
    reports = run(train, dp * tp, config, True)
    layers, tokens = TINY.num_layers, 16 * 24 // dp  # of a step, on a rank
    unit = cost.wire_bytes("all_reduce", 8 * tokens * TINY.d_model, tp)  # of one all-reduce of activations
    times = (5 * layers + 2.5) if sequence_parallel else 4 * layers + 2
    small = cost.wire_bytes("all_reduce", 8 * 3 * tokens, tp)  # the losses
    small += cost.wire_bytes("all_reduce", 8, tp)  # the norm
    norms = (2 * layers + 1) * 2 + layers * 2 + TINY.context
    small += cost.wire_bytes("all_reduce", 8 * TINY.d_model * norms, tp) * sequence_parallel
    for report in reports:
        assert same(report, serial) and report["losses"] == reports[0]["losses"]
        sent = sum(sent for kind, (_, sent) in report["traffic"].items() if kind.endswith(" tp"))
        assert sent == pytest.approx(4 * (times * unit + small), rel=1e-12)


@pytest.mark.parametrize("zero", [1, 3])
def test_bfloat16_with_master_weights(serial, zero):
    config = dataclasses.replace(CONFIG, zero=zero, dp=2, dtype="float32", compute_dtype="bfloat16")
    reports = run(train, 2, config, True)
    psi = TINY.num_parameters
    for report in reports:
        off = [abs(a - b) for a, b in zip(report["losses"], serial["losses"], strict=True)]
        assert 1e-6 < max(off) < 0.05 and report["losses"] == reports[0]["losses"]
        sent = sum(sent for kind, (_, sent) in report["traffic"].items() if "all_reduce" not in kind)
        assert sent == pytest.approx(4 * cost.zero_wire_bytes(zero, 2 * psi, 2), rel=1e-3)  # padding
        assert report["peak_bytes"]["optimizer"] == pytest.approx(12 * psi / 2, rel=0.01)  # step counts
        if zero == 1:
            assert report["peak_bytes"]["parameter"] == 2 * psi


@pytest.mark.parametrize("zero", [0, 3])
def test_validation_where_a_rank_has_no_rows(zero):
    def losses(world):
        config = dataclasses.replace(CONFIG, zero=zero, dp=world.size)
        group = Group("dp", world.ranks, world.rank, world.pg)
        torch.manual_seed(0)
        model = train_module.wrap(GPT(TINY).double(), group, config)
        return train_module.validate(model, data.load().validation, config, group, limit=2)

    (alone,) = run(losses, 1)
    assert list(run(losses, 3)) == pytest.approx([alone] * 3, rel=1e-12)


def test_fewer_rows_at_once_hold_fewer_activations(serial):
    halves = train(Group(), dataclasses.replace(CONFIG, microbatches=4), quiet=True)
    assert halves["peak_bytes"]["activation"] < 0.5 * serial["peak_bytes"]["activation"]


def test_another_seed_another_run(serial):
    other = train(Group(), dataclasses.replace(CONFIG, seed=1, steps=1), quiet=True)
    assert abs(other["losses"][0] - serial["losses"][0]) > 1e-4


def test_dropout_differs_by_rank():
    def seeds(world):
        train(world, TrainConfig(model=TINY, dp=2, steps=1, global_batch=2), quiet=True)
        return torch.initial_seed()

    assert len(set(run(seeds, 2))) == 2


@pytest.mark.parametrize("zero", [0, 3])
def test_under_torchrun(serial, zero, tmp_path):
    report = tmp_path / "report.json"
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 -m lib.train {FLAGS} --zero {zero}"
    command += f" --report {report}"
    done = subprocess.run(
        [sys.executable, *command.split()],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(report.read_text(encoding="utf-8"))
    assert len(written["ranks"]) == 2 and all(same(rank, serial) for rank in written["ranks"])
    assert ("reduce_scatter dp" in written["ranks"][0]["traffic"]) == (zero > 0)
    assert done.stdout.count("validation:") == 1 and "step 4/4" in done.stdout


def test_from_the_terminal_it_learns_more_than_frequencies(tmp_path, capsys):
    report = tmp_path / "report.json"
    main(["--dp", "2", "--steps", "60", "--validate-every", "20", "--report", str(report)])
    out = capsys.readouterr().out
    bar, (loss, validation, sent) = out.split("\r")[-1].splitlines()[0], out.splitlines()[-3:]
    assert re.fullmatch(r"rank 0 \| 100% \S+ *step 60/60, loss \d\.\d{3}, [\d,]+ tokens/s, 00:00 left *", bar)
    assert len(bar) <= 90
    assert loss.startswith("loss: 5.") and validation.startswith("validation: ") and sent.startswith("rank 0 sent ")
    written = json.loads(report.read_text(encoding="utf-8"))
    steps, losses = zip(*written["ranks"][1]["validation"], strict=True)
    assert steps == (0, 20, 40, 60) and list(losses) == sorted(losses, reverse=True)
    assert losses[-1] < data.unigram_entropy(data.load().validation) < losses[0]
    assert len(written["losses"]) == 60 and written["losses"] == written["ranks"][0]["losses"]
    (calls, sent_bytes) = written["ranks"][0]["traffic"]["all_reduce dp"]
    assert calls == 60 * 2 and sent_bytes == 60 * 4 * (GPTConfig().num_parameters + 1)


def test_a_report_of_one_process_without_validation(tmp_path, capsys):
    report = tmp_path / "report.json"
    main([*FLAGS.split(), "--steps", "1", "--validate-every", "0", "--report", str(report)])
    assert "validation" not in capsys.readouterr().out
    (rank,) = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    assert rank["validation"] == [] and rank["traffic"] == {} and rank["peak_bytes"]["optimizer"] > 0


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_trained(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("this must fail before anything is trained")

    for name in ("train", "run", "init"):
        monkeypatch.setattr(train_module, name, fail)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--dp 3 --global-batch 4", "global_batch=4 cannot be split over dp=3; use a multiple of 3"),
        ("--dp 2 --global-batch 4 --microbatches 4", "global_batch=4 cannot be split over dp=2 x microbatches=4"),
        ("--dp 0", "dp=0 must be a whole number of at least 1"),
        ("--dp -1", "dp=-1 must be a whole number of at least 1"),
        ("--dp 1000 --global-batch 1000", "--dp 1000 is more than 64 ranks on one machine"),
        ("--steps 0", "steps=0 must be"),
        ("--global-batch 0", "global_batch=0 must be"),
        ("--microbatches 0", "microbatches=0 must be"),
        ("--validate-every -1", "validate_every=-1 must be"),
        ("--compute-dtype bfloat16", "compute_dtype=bfloat16 needs master weights in float32"),
        ("--compute-dtype bfloat16 --zero 0", "use zero=1, 2 or 3"),
        ("--dp 3 --zero 3 --global-batch 4", "global_batch=4 cannot be split over dp=3; use a multiple of 3"),
        ("--lr 0", "lr=0.0 must be"),
        ("--lr nan", "lr=nan must be"),
        ("--d-model 10 --heads 4", "d_model=10 cannot be split over num_heads=4"),
        ("--layers 0", "num_layers=0"),
        ("--tp 3", "num_heads=4 cannot be split over tp=3; use a multiple of 3"),
        ("--tp 4 --sequence-parallel --context 10", "context=10 cannot be split over tp=4"),
        ("--tp 2 --zero 1", "zero=1 and tp=2: this program shards state where tp=1 only"),
        ("--sequence-parallel", "sequence_parallel needs ranks to cut the sequence for"),
        ("--dp 40 --tp 2 --global-batch 40", "--dp 40 --tp 2 is more than 64 ranks"),
        ("--report /no/such/folder/r.json", "--report /no/such/folder/r.json cannot be written"),
        ("--report /", "--report / cannot be written"),
    ],
)
def test_one_clear_sentence_and_exit_2(flags, says, capsys, nothing_is_trained):
    with pytest.raises(SystemExit) as left:
        main(flags.split())
    captured = capsys.readouterr()
    assert left.value.code == 2 and captured.out == ""
    assert captured.err.startswith("python -m lib.train: ") and says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    ["--dtype float16", "--zero 4", "--zero two", "--compute-dtype float32", "--dp two", "--steps 1.5", "--nonsense"],
)
def test_what_argparse_refuses(flags, capsys, nothing_is_trained):
    with pytest.raises(SystemExit) as left:
        main(flags.split())
    assert left.value.code == 2 and "error: " in capsys.readouterr().err


def test_torchrun_with_another_number_of_ranks(capsys, monkeypatch, nothing_is_trained):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, says in (("0", "--dp 3 needs 3 ranks, but torchrun started 2"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            main(["--dp", "3", "--global-batch", "6"])
        err = capsys.readouterr().err
        assert left.value.code == 2 and says in err and bool(err) == bool(says)


def test_a_report_that_is_there_is_kept_until_there_is_a_new_one(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    report.write_text("old")
    monkeypatch.setattr(train_module, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        main(["--report", str(report)])
    assert report.read_text() == "old"


def test_a_rank_that_fails_and_an_interrupt(capsys, monkeypatch):
    for error, code, says in (
        (RankError("rank 1 of 2 raised ZeroDivisionError", 1), 1, "rank 1 of 2 raised ZeroDivisionError\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ):

        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(train_module, "run", fail)
        with pytest.raises(SystemExit) as left:
            main(["--dp", "2"])
        err = capsys.readouterr().err
        assert left.value.code == code and err.endswith(says) and "Traceback" not in err


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("deep inside")

    monkeypatch.setattr(train_module, "train", fail)
    with pytest.raises(ValueError, match="deep inside"):
        main([])


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Ctrl-C is sent to a process group")
def test_ctrl_c_ends_it_quietly(tmp_path):
    command = [sys.executable, "-u", "-m", "lib.train", *FLAGS.split(), "--steps", "100000", "--dp", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    seen = ""
    while "loss" not in seen and process.poll() is None:
        seen += process.stdout.read(16)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the process and to its server alike
    pressed_s = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert time.monotonic() - pressed_s < 10
    assert err.strip() == "python -m lib.train: interrupted" and "Traceback" not in out


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"steps": 1.5}, {"global_batch": -2}, {"microbatches": 0}, {"dtype": "float16"}, {"dp": 0},
        {"dp": 1.0}, {"lr": -1.0}, {"lr": float("nan")}, {"max_norm": 0.0}, {"validate_every": -1},
        {"zero": 4}, {"zero": -1}, {"zero": "1"}, {"compute_dtype": "float32", "zero": 1},
        {"compute_dtype": "bfloat16"}, {"dp": 3, "global_batch": 4}, {"global_batch": 6, "microbatches": 4},
        {"bucket_bytes": 0},
    ],
)  # fmt: skip
def test_configurations_that_make_no_sense(wrong):
    (name, *_) = wrong
    with pytest.raises(ValueError, match=name):
        TrainConfig(**wrong)
