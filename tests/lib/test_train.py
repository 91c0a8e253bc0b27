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
from itertools import pairwise

import pytest
import torch

from lib import cost, data, run
from lib import train as train_module
from lib.data_parallel.bucketed_gradients import fill_buckets
from lib.lab.certificate import Apart
from lib.launch import RankError
from lib.layout import Layout
from lib.mesh import Group
from lib.model import GPT, GPTConfig
from lib.train import TrainConfig, main, train
from lib.training import loop as train_loop
from lib.verify import largest_difference

TINY = GPTConfig(context=16, d_model=24, num_layers=3, num_heads=2)
CONFIG = TrainConfig(model=TINY, steps=4, global_batch=24, dtype="float64", validate_every=2, bucket_bytes=20_000)
FLAGS = "--context 16 --d-model 24 --num-layers 3 --num-heads 2 --steps 4 --global-batch 24 --dtype float64"
FLAGS += " --validate-every 2"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def serial():
    return train(Group(), CONFIG, quiet=True)


def on(config, **layout):
    return dataclasses.replace(config, layout=Layout(**layout))


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


# All others are in test_certificate.py (what comes out) and test_plan.py (what is sent and held).
LAYOUTS = [(0, 1, 4), (0, 3, 1), (1, 2, 3), (2, 3, 1), (2, 4, 2), (3, 1, 1), (3, 2, 3), (3, 3, 1), (3, 4, 2)]


@pytest.mark.thorough("up to four ranks", keep=2)
@pytest.mark.parametrize("zero, dp, microbatches", LAYOUTS)
def test_the_same_losses_whatever_the_layout(serial, zero, dp, microbatches):
    config = on(CONFIG, zero=zero, dp=dp, microbatches=microbatches)
    reports = run(train, dp, config, True)
    assert len(serial["losses"]) == 4 and len(serial["validation"]) == 3
    assert serial["losses"] == sorted(serial["losses"], reverse=True)
    for report in reports:
        assert same(report, serial)
        assert report["losses"] == reports[0]["losses"]  # one number, not one for each rank
        assert len(report["step_s"]) == 4 and all(0 < x < 60 for x in report["step_s"])
        assert (report["config"]["layout"]["zero"], report["config"]["layout"]["dp"]) == (zero, dp)
        assert report["config"]["model"]["d_model"] == 24

    # What each rank sends in a step: each flat as often as its stage does that, the loss, and of shards the norm.
    flats = flats_bytes(zero, dp)
    reductions = microbatches if zero >= 2 else 1
    calls = {"all_reduce dp": 1 + (0 if zero else len(flats))}
    if zero:
        calls["all_reduce world"] = 1
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


@pytest.mark.thorough("up to eight ranks", keep=1)
@pytest.mark.parametrize("dp, tp, sequence_parallel", [(1, 2, False), (2, 2, True)])
def test_the_same_losses_with_tensor_parallel_ranks(serial, dp, tp, sequence_parallel):
    config = on(CONFIG, dp=dp, tp=tp, sequence_parallel=sequence_parallel, microbatches=2)
    reports = run(train, dp * tp, config, True)
    layers, tokens = TINY.num_layers, 16 * 24 // dp  # of a step, on a rank
    unit = cost.wire_bytes("all_reduce", 8 * tokens * TINY.d_model, tp)  # of one all-reduce of activations
    times = (5 * layers + 2.5) if sequence_parallel else 4 * layers + 2
    small = cost.wire_bytes("all_reduce", 8 * (3 * tokens + 1), tp)  # the losses, and the norm
    norms = (2 * layers + 1) * 2 + layers * 2 + TINY.context
    sums = cost.wire_bytes("all_reduce", 8 * TINY.d_model * norms, dp * tp) * sequence_parallel
    for report in reports:
        assert same(report, serial) and report["losses"] == reports[0]["losses"]
        sent = {axis: 0.0 for axis in ("tp", "dp×tp")}
        for kind, (_, of_kind) in report["traffic"].items():
            axis = kind.split()[1]
            sent[axis] = sent.get(axis, 0.0) + of_kind / 4
        over_both = "dp×tp" if dp > 1 else "tp"  # a group along one long axis has its name
        sent[over_both] -= sums
        assert sent["tp"] == pytest.approx(times * unit + small, rel=1e-12)
        assert sent["dp×tp"] == pytest.approx(0, abs=1e-6)
        assert set(sent) <= {"tp", "dp×tp", "dp"}


FOUR = dataclasses.replace(TINY, num_layers=4)
PIPED = dataclasses.replace(CONFIG, model=FOUR, steps=3, max_norm=0.5)


@pytest.fixture(scope="module")
def serial_of_four():
    return train(Group(), PIPED, quiet=True)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize(
    "dp, pp, schedule, per_rank, microbatches",
    [
        (1, 2, "naive", 1, 1),
        (1, 3, "gpipe", 1, 4),
        (1, 4, "1f1b", 1, 6),
        (2, 2, "zb-h2", 1, 3),
        (1, 2, "zb-v", 2, 3),
        (1, 2, "dualpipe-v", 2, 4),
    ],
)
def test_the_same_losses_in_a_pipeline(serial_of_four, dp, pp, schedule, per_rank, microbatches):
    config = on(PIPED, dp=dp, pp=pp, schedule=schedule, stages_per_rank=per_rank, microbatches=microbatches)
    reports = run(train, dp * pp, config, True)
    rank_of, width, words = config.layout.make_schedule().rank_of, FOUR.d_model, 256
    ends = {rank_of[0], rank_of[-1]}
    for rank, report in enumerate(reports):
        assert same(report, serial_of_four) and report["losses"] == reports[0]["losses"]

        # What each rank sends in a step: each microbatch's activations forward, their gradients back; the gradient of
        # the tied weight; who has the loss tells it; the norm; and the gradients of its own stages.
        place = rank % pp
        out = sum(place in pair and len({*pair}) == 2 for pair in pairwise(rank_of))
        is_end = place in ends and len(ends) == 2
        psi = report["peak_bytes"]["parameter"]
        calls = {"send pp": out * microbatches, "broadcast pp": 1}
        sent = {"send pp": 8 * out * (24 // dp) * 16 * width}
        sent["broadcast pp"] = cost.wire_bytes("broadcast", 8 * microbatches, pp)
        sent["all_reduce pp"] = cost.wire_bytes("all_reduce", 8, pp)
        tied = 8 * words * width * is_end  # summed over both ends of all replicas
        if is_end:
            axes = "all_reduce dp×pp" if dp > 1 else "all_reduce pp"
            sent[axes] = sent.get(axes, 0) + cost.wire_bytes("all_reduce", tied, 2 * dp)
        if dp > 1:
            sent["all_reduce dp"] = cost.wire_bytes("all_reduce", psi - tied + 8, dp)
        traffic = report["traffic"]
        assert {kind: n / 3 for kind, (n, _) in traffic.items() if kind in calls} == calls
        assert {kind: n / 3 for kind, (_, n) in traffic.items() if n} == pytest.approx(
            {kind: n for kind, n in sent.items() if n}, rel=1e-12
        )

        # And holds: what belongs to its stages, and nothing of the others.
        peak = report["peak_bytes"]
        assert psi < peak["gradient"] <= psi + 8 * words * width  # and one on its way into its bucket
        assert 2 * psi < peak["optimizer"] < 2.02 * psi  # step counts
        assert len(report["step_s"]) == 3 and report["config"]["layout"]["schedule"] == schedule
    whole = sum(report["peak_bytes"]["parameter"] for report in reports)
    copies = len(ends) - 1  # of the tied weight: both ends have it
    assert whole == dp * 8 * (FOUR.num_parameters + copies * words * width)


def steps(world, config):
    """Losses, this rank's clipped gradients of each step, and its weights at the end, by their serial names."""
    model = train_loop.build(world, config)
    named = {fact.name: fact.parameter for fact in model.facts}
    gradients, step = [], model.owner.step

    def keep_and_step():
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        step()

    model.owner.step = keep_and_step
    tokens = data.load().train
    losses = [train_loop.train_step(model, tokens, i, config) for i in range(config.steps)]
    return losses, gradients, {name: p.detach() for name, p in named.items()}


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dp, schedule, per_rank", [(1, "zb-h2", 1), (2, "interleaved", 2)])
def test_clipped_gradients_and_weights_of_a_pipeline(dp, schedule, per_rank, tied):
    config = dataclasses.replace(PIPED, model=dataclasses.replace(FOUR, tied=tied))
    losses, gradients, weights = steps(Group(), config)
    for of_step in gradients:
        norm = torch.stack([g.square().sum() for g in of_step.values()]).sum().sqrt()
        assert norm.item() == pytest.approx(0.5, rel=1e-5), "so it was clipped"
    config = on(config, dp=dp, pp=2, schedule=schedule, stages_per_rank=per_rank, microbatches=4)
    ranks = run(steps, 2 * dp, config)
    for its_losses, its_gradients, its_weights in ranks:
        assert its_losses == pytest.approx(losses, rel=1e-12)
        for mine, right in zip(its_gradients, gradients, strict=True):
            assert largest_difference(mine, {name: right[name] for name in mine}) < 1e-12
        assert largest_difference(its_weights, {name: weights[name] for name in its_weights}) < 1e-8
    assert {name for *_, its in ranks for name in its} == set(weights)
    held = [its["embed.token.weight"] for *_, its in ranks if "embed.token.weight" in its]
    assert len(held) == (2 * dp if tied else dp) and all(torch.equal(one, held[0]) for one in held)


def test_1f1b_holds_fewer_microbatches_than_gpipe():
    last = []
    for schedule in ("gpipe", "1f1b"):
        config = on(dataclasses.replace(PIPED, steps=2, validate_every=0), pp=2, microbatches=6, schedule=schedule)
        last.append(run(train, 2, config, True)[1]["peak_bytes"]["activation"])
    assert last[1] < 0.5 * last[0]


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("zero", [1, 3])
def test_bfloat16_with_master_weights(serial, zero):
    config = dataclasses.replace(CONFIG, layout=Layout(zero=zero, dp=2), dtype="float32", compute_dtype="bfloat16")
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


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("zero, pp", [(0, 1), (3, 1), (0, 2)])
def test_validation_where_a_rank_has_no_rows(zero, pp):
    def losses(world):
        dp = max(1, world.size // pp)
        config = on(CONFIG, zero=zero, dp=dp, pp=world.size // dp, microbatches=2)
        model = train_loop.build(world, config)
        return train_loop.validate(model, data.load().validation, config, limit=2)

    (alone,) = run(losses, 1)
    assert list(run(losses, 3 * pp)) == pytest.approx([alone] * 3 * pp, rel=1e-12)


def test_validation_drops_nothing_and_training_goes_on_dropping():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(TINY, dropout=0.5))
    model = train_loop.build(Group(), config)
    model.stages[0].module.blocks["1"].eval()  # somebody's choice
    modes = [module.training for module in model.stages[0].module.modules()]
    losses = {train_loop.validate(model, data.load().validation, config, limit=4) for _ in range(3)}
    assert len(losses) == 1, "each look at the same text tells the same"
    assert [module.training for module in model.stages[0].module.modules()] == modes and not all(modes)


def test_fewer_rows_at_once_hold_fewer_activations(serial):
    halves = train(Group(), on(CONFIG, microbatches=4), quiet=True)
    assert halves["peak_bytes"]["activation"] < 0.5 * serial["peak_bytes"]["activation"]


def test_another_seed_another_run(serial):
    other = train(Group(), dataclasses.replace(CONFIG, seed=1, steps=1), quiet=True)
    assert abs(other["losses"][0] - serial["losses"][0]) > 1e-4


DROPS = dataclasses.replace(PIPED, model=dataclasses.replace(FOUR, dropout=0.3))


@pytest.mark.thorough("up to eight ranks")
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "microbatches": 3},
        {"pp": 2, "schedule": "zb-h1", "microbatches": 4},
        {"tp": 2, "recompute": "selective"},
        {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        {"dp": 2, "pp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 2, "zero": 1},
        {"dp": 2, "zero": 3},
    ],
)
def test_the_same_elements_are_dropped_in_every_layout(layout):
    wanted = train(Group(), DROPS, quiet=True)
    assert abs(wanted["losses"][0] - train(Group(), PIPED, quiet=True)["losses"][0]) > 1e-3, "something is dropped"
    config = on(DROPS, **layout)
    for report in run(train, config.layout.num_ranks, config, True):
        assert report["losses"] == pytest.approx(wanted["losses"], rel=1e-12)


def test_only_the_profiled_step_waits_for_a_gpu(monkeypatch):
    read = []  # how often the clock that waits was read
    monkeypatch.setattr(train_loop, "done_s", lambda: read.append(len(read)) or float(len(read)))
    losses, spans = [], []
    for profile in (False, True):
        config = dataclasses.replace(CONFIG, validate_every=0, steps=2, global_batch=2)
        report = train(Group(), config, True, None, profile)
        losses.append(report["losses"])
        spans = report["profile"].spans if profile else spans
        assert bool(read) == profile
    assert losses[0] == losses[1]
    assert {span.start_s % 1 for span in spans} == {0.0}, "each span of the last step has this clock"
    assert [span.kind for span in spans][-1] == "optimizer"


@pytest.mark.thorough("torchrun imports torch in each rank")
@pytest.mark.parametrize("flags, sends", [("--pp 2 --microbatches 4", "send pp")])  # another: test_checkpoint.py
def test_under_torchrun(serial, flags, sends, tmp_path):
    report = tmp_path / "report.json"
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 -m lib.train {FLAGS} {flags}"
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
    assert sends in written["ranks"][0]["traffic"]
    assert done.stdout.count("validation:") == 1 and "step 4/4" in done.stdout


@pytest.mark.thorough("seconds of several processes")
def test_from_the_terminal_it_learns_more_than_frequencies(tmp_path, capsys):
    report = tmp_path / "report.json"
    main(["--dp", "2", "--steps", "60", "--validate-every", "20", "--report", str(report)])
    out = capsys.readouterr().out
    bar, (loss, validation, sent, door) = out.split("\r")[-1].splitlines()[0], out.splitlines()[-4:]
    assert re.fullmatch(
        r"rank 0 \| 100% \S+ *step 60/60, loss \d\.\d{3}, [\d,]+ tokens/s, [\d.]+ MB, 00:00 left *", bar
    )
    assert len(bar) <= 90
    assert loss.startswith("loss: 5.") and validation.startswith("validation: ") and sent.startswith("rank 0 sent ")
    assert door == f"report: python -m book.figures.report {report} draws it"
    written = json.loads(report.read_text(encoding="utf-8"))
    steps, losses = zip(*written["ranks"][1]["validation"], strict=True)
    assert steps == (0, 20, 40, 60) and list(losses) == sorted(losses, reverse=True)
    assert losses[-1] < data.unigram_entropy(data.load().validation) < losses[0]
    assert len(written["losses"]) == 60 and written["losses"] == written["ranks"][0]["losses"]
    (calls, sent_bytes) = written["ranks"][0]["traffic"]["all_reduce dp"]
    assert calls == 60 * 2 and sent_bytes == 60 * (4 * GPTConfig().num_parameters + 8)


@pytest.mark.thorough("a process that imports torch")
def test_a_llama_from_the_terminal(tmp_path):
    """Its layout changes nothing, and it is no GPT-2."""
    report, losses = tmp_path / "report.json", []
    layout = "--dp 2 --pp 2 --tp 2 --sequence-parallel --microbatches 2 --zero 1"
    for flags in ("--llama", f"--llama {layout}", ""):
        main([*FLAGS.split(), *flags.split(), "--num-kv-heads", "1", "--d-mlp", "40", "--report", str(report)])
        written = json.loads(report.read_text(encoding="utf-8"))
        losses.append(written["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12) and abs(losses[0][0] - losses[2][0]) > 1e-3
    model = written["ranks"][0]["config"]["model"]
    assert (model["llama"], model["tied"], model["d_mlp"]) == (False, True, 40)


def test_a_layout_certifies_itself_from_the_terminal(capsys, monkeypatch):
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), "--dp", "2", "--zero", "1", "--certify"])
    assert left.value.code == 0
    apart = re.findall(r"\de[-+]\d+", capsys.readouterr().out)
    assert len(apart) == 3 and all(float(number) < 1e-8 for number in apart)
    monkeypatch.setattr(train_module, "certify_run", lambda world, config: Apart(1e-16, 1e-9, 1e-16))
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), "--certify"])
    assert left.value.code == 1 and "gradient 1e-09" in capsys.readouterr().out


def test_a_report_of_one_process_without_validation(tmp_path, capsys):
    report = tmp_path / "report.json"
    main([*FLAGS.split(), "--steps", "1", "--validate-every", "0", "--report", str(report)])
    assert "validation" not in capsys.readouterr().out
    (rank,) = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    assert rank["validation"] == [] and rank["traffic"] == {} and rank["peak_bytes"]["optimizer"] > 0


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--dp 3 --global-batch 4", "--global-batch 4 cannot be split over --dp 3; use a multiple of 3, such as 6"),
        (
            "--dp 2 --global-batch 4 --microbatches 4",
            "--global-batch 4 cannot be split over --dp 2 x --microbatches 4",
        ),
        ("--dp 0", "--dp 0 must be a whole number of at least 1"),
        ("--dp -1", "--dp -1 must be a whole number of at least 1"),
        ("--dp 1000 --global-batch 1000", "--dp 1000 is more than 64 ranks on one machine"),
        ("--steps 0", "--steps 0 must be"),
        ("--global-batch 0", "--global-batch 0 must be"),
        ("--microbatches 0", "--microbatches 0 must be"),
        ("--validate-every -1", "--validate-every -1 must be"),
        ("--compute-dtype bfloat16", "--compute-dtype needs master weights"),
        ("--compute-dtype bfloat16 --zero 0", "use --zero 1"),
        (
            "--dp 3 --zero 3 --global-batch 4",
            "--global-batch 4 cannot be split over --dp 3; use a multiple of 3, such as 6",
        ),
        ("--lr 0", "--lr 0.0 must be"),
        ("--lr nan", "--lr nan must be"),
        ("--d-model 10 --num-heads 4", "--d-model 10 cannot be split over --num-heads 4"),
        ("--num-layers 0", "--num-layers 0"),
        ("--tp 3", "--num-heads 4 cannot be split over --tp 3; use a multiple of 3"),
        ("--tp 4 --sequence-parallel --context 10", "--context 10 cannot be split over --tp 4"),
        (
            "--llama --tp 4 --d-mlp 10",
            "--d-mlp 10 cannot be split over --tp 4; use a multiple of 4. Or take the nearest",
        ),
        (
            "--tp 2 --num-heads 6 --d-model 24 --num-kv-heads 3",
            "--num-kv-heads 3 cannot be split over --tp 2, nor 2 ranks over 3 heads; use --num-kv-heads 2, or --tp 1",
        ),
        ("--llama --d-model 12", "d_head=3: RoPE turns pairs; use --d-model 16"),
        (
            "--tp 2 --zero 3",
            "--zero 3 and --tp 2: parameters are shards of full matrices here; use --zero 1 or --zero 2",
        ),
        (
            "--pp 2 --zero 3",
            "--zero 3 and --pp 2: the parameters of a stage would be gathered twice for each microbatch",
        ),
        ("--seed 99999999999999999999999", "--seed 99999999999999999999999 must be a whole number from 0 to"),
        ("--seed -1", "--seed -1 must be"),
        ("--context 100000000", "is too short for --context 100000000; use a shorter"),
        ("--pp 0", "--pp 0 must be a whole number of at least 1"),
        ("--pp 4", "2 blocks and a head cannot be cut into 4 stages; use 3 stages or fewer"),
        ("--pp 2 --schedule interleaved --stages-per-rank 2", "2 blocks and a head cannot be cut into 4 stages"),
        (
            "--pp 2 --schedule interleaved",
            "--schedule interleaved and --stages-per-rank 1: use interleaved with 2 or more",
        ),
        ("--pp 2 --stages-per-rank 2", "--schedule 1f1b and --stages-per-rank 2: use interleaved with 2 or more"),
        (
            "--pp 2 --schedule interleaved --stages-per-rank 2 --num-layers 4 --microbatches 3 --global-batch 3",
            "--microbatches 3 must be a multiple of the 2 ranks, such as 4",
        ),
        (
            "--schedule gpipe",
            "--schedule gpipe with --stages-per-rank 1 needs ranks to split the layers over: use --pp 2",
        ),
        (
            "--pp 2 --global-batch 4 --microbatches 8",
            "--global-batch 4 cannot be split over --dp 1 x --microbatches 8",
        ),
        ("--dp 40 --pp 2 --global-batch 40", "--dp 40 --pp 2 is more than 64 ranks"),
        ("--sequence-parallel", "--sequence-parallel needs ranks to shard the sequence over"),
        ("--dp 40 --tp 2 --global-batch 40", "--dp 40 --tp 2 is more than 64 ranks"),
        ("--report /no/such/folder/r.json", "--report /no/such/folder/r.json cannot be written"),
        ("--report /", "--report / cannot be written"),
        ("--profile /no/such/folder/p.json", "--profile /no/such/folder/p.json cannot be written"),
        (
            "--profile p.json --steps 2",
            "--profile needs a step after the first two, because they are slow: use --steps 3",
        ),
        ("--plan --ranks-per-node 0", "--ranks-per-node 0 must be a whole number of at least 1"),
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
    [
        "--dtype float16",
        "--schedule afab",
        "--zero 4",
        "--zero two",
        "--compute-dtype float32",
        "--dp two",
        "--steps 1.5",
        "--nonsense",
    ],
)
def test_what_argparse_refuses(flags, capsys, nothing_is_trained):
    with pytest.raises(SystemExit) as left:
        main(flags.split())
    assert left.value.code == 2 and "error: " in capsys.readouterr().err


def test_torchrun_with_another_number_of_ranks(capsys, monkeypatch, nothing_is_trained):
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for rank, says in (("0", "--dp 3 needs 3 ranks, but torchrun started 2"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            main(["--dp", "3", "--global-batch", "6"])
        err = capsys.readouterr().err
        assert left.value.code == 2 and says in err and bool(err) == bool(says)


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2"}, {"RANK": "0"}, {"RANK": "1", "WORLD_SIZE": "x"}])
def test_half_of_torchrun(variables, capsys, monkeypatch, nothing_is_trained):
    """As clusters and containers set it; one sentence, on every rank."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main(["--steps", "3"])
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.count("\n") == 1 and "or unset them to run without it" in err
    monkeypatch.undo()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    main(["--plan"])


def test_a_report_that_is_there_is_kept_until_there_is_a_new_one(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    report.write_text("old")
    monkeypatch.setattr(train_module, "train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        main(["--report", str(report)])
    assert report.read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a file that is always full")
def test_a_report_that_finds_no_room_says_so_and_the_losses(capsys):
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), "--steps", "2", "--report", "/dev/full"])
    assert left.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    said, losses = last.split(" Losses: ")
    assert said == "python -m lib.train: --report /dev/full could not be written: No space left on device."
    assert len(losses.split()) == 2 and all(float(loss) > 0 for loss in losses.split())


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


@pytest.mark.thorough("a process that imports torch")
@pytest.mark.timed("it presses Ctrl-C, and measures how soon all has ended")
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
        {"steps": 0}, {"steps": 1.5}, {"global_batch": -2}, {"dtype": "float16"}, {"lr": -1.0}, {"lr": float("nan")},
        {"max_norm": 0.0}, {"validate_every": -1}, {"compute_dtype": "float32", "layout": Layout(zero=1)},
        {"compute_dtype": "bfloat16"}, {"global_batch": 4, "layout": Layout(dp=3)}, {"bucket_bytes": 0}, {"seed": -1},
        {"global_batch": 6, "layout": Layout(microbatches=4)},
    ],
)  # fmt: skip
def test_configurations_that_make_no_sense(wrong):
    (name, *_) = wrong
    with pytest.raises(ValueError, match=name):
        TrainConfig(**wrong)
