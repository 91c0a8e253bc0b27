"""Checkpoints: any layout loads any, bit for bit in the same one; and whoever is killed, whenever, loses nothing."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import cloudpickle
import psutil
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lib import run
from lib import train as train_command
from lib.checkpoint import files, saver, signals, storage
from lib.checkpoint import folder as folders
from lib.checkpoint.__main__ import main as export
from lib.checkpoint.boxes import Box, boxes_of_part, boxes_of_range
from lib.checkpoint.files import CHECKSUMS, LOCK, CheckpointError, Lock, checksum, note_checksums, reason
from lib.checkpoint.saver import SIGNALS, Checkpoints, passed_on
from lib.checkpoint.storage import Save, restore
from lib.launch import RankError
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig
from lib.parallel import parallelize
from lib.placement import Fused, Partial, Replicate, Shard, shard
from lib.train import TrainConfig, main, train
from lib.training import loop as train_loop

cloudpickle.register_pickle_by_value(sys.modules[__name__])
TINY = GPTConfig(context=16, d_model=24, num_layers=4, num_heads=4, num_kv_heads=2, dropout=0.2)
SIZES = {"steps": 6, "global_batch": 24, "dtype": "float64", "validate_every": 3, "bucket_bytes": 20_000}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """With two, sums are in another order, and their last bit may be another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on(config=None, steps=None, **layout):
    config = config or TrainConfig(model=TINY, **SIZES)
    return dataclasses.replace(config, steps=steps or config.steps, layout=Layout(**layout))


def trained(config, checkpoints=None):
    """All ranks' reports; one rank is this process."""
    ranks = config.layout.num_ranks
    if ranks == 1:
        return [train(Group(), config, True, checkpoints)]
    return run(train, ranks, config, True, checkpoints)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """The report of a run on one process that nobody stopped, and where its last step is."""
    place = tmp_path_factory.mktemp("serial")
    (report,) = trained(on(), Checkpoints(str(place), 100))
    return report, place / "step-00000006"


def tensors(path):
    """Everything in a checkpoint, whole, read by PyTorch's own converter."""
    file = f"{path}.pt"
    dcp_to_torch_save(path, file)
    return torch.load(file)


# ---- boxes ----------------------------------------------------------------------------------------------------------


def test_a_range_is_the_boxes_of_the_picture():
    assert list(boxes_of_range((5, 4), 5, 17)) == [((1, 1), (1, 3)), ((2, 0), (2, 4)), ((4, 0), (1, 1))]
    assert list(boxes_of_range((), 0, 1)) == [((), ())] and not list(boxes_of_range((), 0, 0))
    assert not list(boxes_of_range((3, 0), 0, 0)) and not list(boxes_of_range((3, 2), 4, 4))


def test_any_range_of_any_shape_is_a_few_boxes_in_order():
    draw = random.Random(0)
    for _ in range(500):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        x = torch.arange(math.prod(shape)).view(shape)
        start, stop = sorted(draw.randint(0, x.numel()) for _ in range(2))
        boxes = list(boxes_of_range(shape, start, stop))
        got = [x[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in boxes]
        assert torch.cat([x.flatten()[:0], *got]).tolist() == list(range(start, stop))
        assert len(boxes) <= 2 * len(shape) - 1


PLACED = [
    (Replicate(), 3),
    (Shard(0), 3),
    (Shard(1), 2),
    (Shard(1, copies=2), 4),
    (Fused(0, (12, 6, 6), (1, 1, 1)), 3),
]
PLACED += [(Fused(0, (12, 6, 6), (1, 2, 2)), 4), (Fused(1, (8, 4), (1, 2)), 4), (Shard(0), 1)]


@pytest.mark.parametrize("placement, n", PLACED)
def test_what_all_ranks_have_of_a_tensor_is_the_tensor(placement, n):
    """Each rank's part is cut again, into ranges as ZeRO cuts it; the boxes put back together are the whole."""
    whole = torch.randn(24, 12)
    again, seen = torch.full_like(whole, math.nan), torch.zeros_like(whole)
    for rank in range(n):
        group = Group("tp", tuple(range(n)), rank)
        part = shard(whole, placement, group)
        for low, high in itertools.pairwise([0, 17, 18, part.numel() // 2, part.numel()]):
            piece = part.flatten()[low:high].clone()
            for box, values in boxes_of_part(piece, slice(low, high), part.shape, placement, group):
                here = tuple(slice(o, o + k) for o, k in zip(*box, strict=True))
                assert values.shape == box.shape
                again[here], seen[here] = values, seen[here] + 1
                values.zero_()  # a view: who loads fills it
            assert not piece.any()
    copies = {Replicate: n, Shard: getattr(placement, "copies", 1)}.get(type(placement))
    assert torch.equal(again, whole) and (copies is None or (seen == copies).all())


def test_a_term_of_a_sum_has_no_boxes():
    with pytest.raises(ValueError, match="has no position in the full tensor"):
        list(boxes_of_part(torch.zeros(4), slice(0, 4), torch.Size([4]), Partial(), Group()))


# ---- layouts --------------------------------------------------------------------------------------------------------

LLAMA = dataclasses.replace(TINY, llama=True, tied=False, d_mlp=40)  # gate and up are one tensor
JOURNEYS = [
    (TINY, [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2, "microbatches": 2}, {"dp": 8, "zero": 1}, {}]),
    (
        TINY,
        [
            {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 2},
            {"tp": 4, "sequence_parallel": True},  # two ranks for each head of keys and values
            {"dp": 3, "zero": 3},
            {"pp": 2, "schedule": "zb-v", "stages_per_rank": 2, "microbatches": 2},
        ],
    ),
    (
        TINY,
        [
            {},
            {"dp": 2, "pp": 2, "zero": 1},
            {"dp": 2, "tp": 2, "pp": 2, "order": "tp,dp,pp", "zero": 1},
            {"dp": 2, "zero": 3},
        ],
    ),
    (
        LLAMA,
        [
            {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 1},
            {},
            {"pp": 2, "tp": 4, "microbatches": 2},
            {"dp": 2, "zero": 3},
        ],
    ),
    (
        TINY,
        [
            {"cp": 2, "attention": "ring", "token_order": "zigzag", "zero": 1},
            {},
            {"cp": 2, "tp": 2, "attention": "ulysses", "zero": 2},
            {"dp": 2, "cp": 2, "token_order": "striped", "zero": 3},
        ],
    ),
]


@pytest.mark.thorough("each goes through several layouts")
@pytest.mark.parametrize("model, journey", JOURNEYS)
def test_each_stage_under_another_layout(model, journey, tmp_path):
    config, place, resume = TrainConfig(model=model, **SIZES), str(tmp_path / "journey"), None
    (wanted,) = trained(config, Checkpoints(str(tmp_path / "serial"), 100))
    for steps, layout in zip((2, 3, 5, 6), journey, strict=True):
        reports = trained(on(config, steps, **layout), Checkpoints(place, 100, keep=2, resume=resume))
        resume = folders.path_of(place, steps)
    for report in reports:
        assert report["losses"] == pytest.approx(wanted["losses"], rel=1e-12)
        assert [step for step, _ in report["validation"]] == [0, 3, 6], "not at the end of each stage"
    assert folders.complete(place) == [folders.path_of(place, step) for step in (5, 6)]
    ours, theirs = tensors(resume), tensors(tmp_path / "serial" / "step-00000006")
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert (ours[name] - x).norm() <= 1e-8 * max(1, x.norm()), name


UNTIED = dataclasses.replace(TINY, tied=False)


def bit_for_bit(config, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    wanted = trained(config, Checkpoints(str(whole), 100))
    trained(dataclasses.replace(config, steps=2), Checkpoints(str(cut), 100))
    reports = trained(config, Checkpoints(str(cut), 100, resume=str(cut / "step-00000002")))
    assert all(a["losses"] == b["losses"] for a, b in zip(reports, wanted, strict=True)), "to the last bit"
    ours, theirs = (tensors(place / f"step-{config.steps:08d}") for place in (cut, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], x) for name, x in theirs.items())
    return theirs


@pytest.mark.thorough("up to eight ranks", keep=1)
@pytest.mark.parametrize(
    "layout, more",
    [
        ({}, {}),
        ({"dp": 2, "pp": 2, "zero": 1, "microbatches": 2}, {"dtype": "float32"}),
        ({"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 2}, {"dtype": "float32", "compute_dtype": "bfloat16"}),
        ({"dp": 2, "zero": 3}, {"dtype": "float32", "compute_dtype": "bfloat16", "model": UNTIED}),
    ],
)
def test_to_the_last_bit_in_the_same_layout(layout, more, tmp_path):
    config = dataclasses.replace(on(steps=4, **layout), validate_every=0, **more)
    saved = bit_for_bit(config, tmp_path)
    float_type = getattr(torch, config.dtype)
    assert {x.dtype for name, x in saved.items() if not name.endswith(".step")} == {float_type}, (
        "not what it computes in"
    )
    assert {float(x) for name, x in saved.items() if name.endswith(".step")} == {4.0}
    names = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    assert sorted(names) == sorted(name for name, _ in GPT(config.model).named_parameters())


@pytest.mark.thorough("many layouts", keep=1)
@pytest.mark.parametrize(
    "layout", [{}, {"dp": 2, "zero": 1}, {"cp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}, {"dp": 3, "zero": 3}]
)
def test_as_large_as_the_formula_whatever_the_layout(layout, tmp_path):
    config = dataclasses.replace(on(steps=1, **layout), validate_every=0, dtype="float32")
    trained(config, Checkpoints(str(tmp_path)))
    path = tmp_path / "step-00000001"
    metadata = FileSystemReader(path).read_metadata()
    boxes = [
        math.prod(chunk.sizes) * x.properties.dtype.itemsize
        for x in metadata.state_dict_metadata.values()
        for chunk in x.chunks
    ]
    psi, num_tensors = TINY.num_parameters, len(list(GPT(TINY).parameters()))
    assert sum(boxes) == 12 * psi + 4 * num_tensors, "each box once: weight and two moments, and a step each"
    on_disk = sum(file.stat().st_size for file in path.iterdir())
    assert 0 < on_disk - sum(boxes) < 2200 * len(boxes)


def test_a_plain_state_dict(serial, tmp_path, capsys):
    report, path = serial
    export([str(path), "--out", str(tmp_path / "weights.pt")])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/weights.pt: ")
    model = GPT(TINY).double()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    saved = tensors(path)
    assert all(torch.equal(p, saved[f"model.{name}"]) for name, p in model.named_parameters())
    assert json.loads((path / "run.json").read_text())["losses"] == report["losses"]


def momentum_and_frozen(world, place, layout, steps):
    """Weights after some steps of SGD with momentum; positions are frozen. Goes on from `place`, if that is there."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(TINY, dropout=0.0)).double()
    model.embed.position.weight.requires_grad_(False)
    ours = parallelize(
        model, Mesh(MeshShape(**layout.sizes), world), layout, partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    if os.path.exists(place):
        restore(ours, str(place))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (8, 17), generator=generator)
    for _ in range(steps):
        ours.step(tokens[:, :-1], tokens[:, 1:], 1.0)
    save = Save(ours, f"{place}-{steps}")
    assert save.finish() == ""
    return ours.full_state_dict()


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_momentum_and_frozen_parameters(zero, tmp_path):
    whole = momentum_and_frozen(Group(), tmp_path / "none", Layout(), 4)
    run(momentum_and_frozen, 2, tmp_path / "none", Layout(dp=2, zero=zero), 2)
    (tmp_path / "none-2").rename(tmp_path / "half")
    saved = tensors(tmp_path / "half")
    assert {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.")} == {"momentum_buffer"}
    assert "model.embed.position.weight" in saved
    assert "optimizer.embed.position.weight.momentum_buffer" not in saved
    again = momentum_and_frozen(Group(), tmp_path / "half", Layout(), 2)
    assert max((again[name] - x).abs().max().item() for name, x in whole.items()) < 1e-12


# ---- while training goes on -----------------------------------------------------------------------------------------


@pytest.mark.thorough("steps that are measured")
def test_training_goes_on_while_a_thread_writes(tmp_path, monkeypatch, serial):
    """The writer of step 4 waits until step 6 has begun; if training waited for it, neither would come."""
    later, write, waited = threading.Event(), FileSystemWriter.write_data, []

    def slow(self, plan, planner):
        waited.append(later.wait(20))
        return write(self, plan, planner)

    def step(model, tokens, number, config, train_step=train_loop.train_step):
        if number == 5:
            later.set()
        return train_step(model, tokens, number, config)

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    monkeypatch.setattr(train_loop, "train_step", step)
    trained(on(), Checkpoints(str(tmp_path), 4))
    assert waited == [True, True]
    (report,) = trained(on(), Checkpoints(str(tmp_path), resume=str(tmp_path / "step-00000004")))
    assert report["losses"] == serial[0]["losses"], "the copy is of step 4, not of when it was written"


@pytest.mark.thorough("seconds of several processes")
def test_no_room_loses_no_checkpoint_and_no_step(tmp_path, serial):
    def crowded(world, config, checkpoints):
        write = FileSystemWriter.write_data

        def full(self, plan, planner):
            if world.rank == 1 and "00000004" in str(self.path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(self, plan, planner)

        FileSystemWriter.write_data = full
        return train(world, config, True, checkpoints)

    reports = run(crowded, 2, on(dp=2), Checkpoints(str(tmp_path), 2))
    assert [os.path.basename(path) for path in sorted(os.listdir(tmp_path))] == ["step-00000002", "step-00000006"]
    assert reports[0]["losses"] == pytest.approx(serial[0]["losses"], rel=1e-12) and reports[0]["unsaved"] == ""
    shutil.rmtree(tmp_path / "step-00000006")
    reports = run(
        crowded, 2, on(steps=4, dp=2), Checkpoints(str(tmp_path), 9, resume=str(tmp_path / "step-00000002"))
    )
    said = f"step-00000004 could not be written to {tmp_path}: rank 1: No space left on device; older ones are kept"
    assert [report["unsaved"] for report in reports] == [said] * 2
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_a_save_that_cannot_make_its_folder_says_so_and_training_goes_on(tmp_path, capsys, monkeypatch, serial):
    """A file is in its place, or in the place of the folder of all checkpoints."""

    def step(model, tokens, i, config, train_step=train_loop.train_step):
        if i == 1:
            (tmp_path / "runs" / ".step-00000002").touch()
        return train_step(model, tokens, i, config)

    with monkeypatch.context() as patch:
        patch.setattr(train_loop, "train_step", step)
        (report,) = trained(on(), Checkpoints(str(tmp_path / "runs"), 2))
    said = f"step-00000002 could not be written to {tmp_path}/runs: rank 0: File exists; older ones are kept"
    assert capsys.readouterr().err.strip() == said
    assert report["unsaved"] == "" and report["losses"] == serial[0]["losses"]
    assert {*os.listdir(tmp_path / "runs")} == {"step-00000004", "step-00000006"}

    def step(model, tokens, i, config, train_step=train_loop.train_step):
        if i == 5:
            shutil.rmtree(tmp_path / "runs")
            (tmp_path / "runs").touch()
        return train_step(model, tokens, i, config)

    with monkeypatch.context() as patch:
        patch.setattr(train_loop, "train_step", step)
        resume = str(tmp_path / "runs" / "step-00000004")
        (report,) = trained(on(), Checkpoints(str(tmp_path / "runs"), 9, resume=resume))
    said = f"step-00000006 could not be written to {tmp_path}/runs: rank 0: Not a directory; older ones are kept"
    assert report["unsaved"] == said


def test_the_reason_is_the_disk_even_if_torch_hides_it():
    """torch.save on a full disk raises a RuntimeError about its archive, while it handles the OSError."""
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")
    except RuntimeError as error:
        assert reason(error) == "No space left on device"
    assert reason(RuntimeError("else\nmore")) == "RuntimeError: else"


# ---- killed ---------------------------------------------------------------------------------------------------------


def killed(world, config, checkpoints, moment, victim):
    """A run of which one rank is killed in the middle of the save after step 4."""
    write, finish, rename, remove = FileSystemWriter.write_data, FileSystemWriter.finish, os.rename, shutil.rmtree

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half(writer, plan, planner):
        write(writer, plan, planner)
        file = writer.path / f"__{world.rank}_0.distcp"
        os.truncate(file, file.stat().st_size // 2)
        die()

    def in_save_4(method, instead):
        return lambda writer, *args: (instead if "00000004" in str(writer.path) else method)(writer, *args)

    if world.rank == victim:
        match moment:
            case "before it writes":
                FileSystemWriter.write_data = in_save_4(write, die)
            case "in the middle of its file":
                FileSystemWriter.write_data = in_save_4(write, write_half)
            case "when all have written, before the list of boxes":
                FileSystemWriter.finish = in_save_4(finish, die)
            case "before the rename":
                os.rename = lambda a, b: die() if str(b).endswith("step-00000004") else rename(a, b)
            case "in the middle of removing an old one":
                shutil.rmtree = lambda path, **_: die() if "step-00000002" in path else remove(path, **_)
    return train(world, config, True, checkpoints)


def to_be_killed():
    return dataclasses.replace(on(dp=2, zero=1), dtype="float32", validate_every=0)


@pytest.fixture(scope="module")
def not_killed():
    """The losses of the run that nobody kills."""
    return run(train, 2, to_be_killed(), True)[0]["losses"]


@pytest.mark.thorough("each place is a run that is killed and one that resumes")
@pytest.mark.parametrize(
    "moment, victim, goes_on_from",
    [
        ("before it writes", 1, 2),
        ("in the middle of its file", 0, 2),
        ("in the middle of its file", 1, 2),
        ("when all have written, before the list of boxes", 0, 2),
        ("before the rename", 0, 2),
        ("in the middle of removing an old one", 0, 4),
    ],
)
def test_killed_in_the_middle_of_a_save(moment, victim, goes_on_from, tmp_path, not_killed):
    config, settings = to_be_killed(), Checkpoints(str(tmp_path), 2, keep=1)
    with pytest.raises(RankError, match="SIGKILL"):
        run(killed, 2, config, settings, moment, victim)
    assert [folders.step_of(path) for path in folders.complete(str(tmp_path))] == [goes_on_from]
    assert len({*os.listdir(tmp_path)} - {LOCK}) == 2, "and a hidden one"
    resume = folders.choose(str(tmp_path), "auto", config)
    assert folders.step_of(resume) == goes_on_from
    reports = run(train, 2, config, True, dataclasses.replace(settings, resume=resume))
    assert reports[0]["losses"] == not_killed, "to the last bit"
    assert os.listdir(tmp_path) == ["step-00000006"]


FLAGS = "--context 16 --d-model 24 --num-layers 4 --num-heads 4 --num-kv-heads 2 --dropout 0.2 --global-batch 24"
FLAGS += " --dtype float64 --validate-every 3 --steps 6"


@pytest.mark.thorough("torchrun starts ranks three times")
@pytest.mark.slow(
    "two real processes of torchrun, which are killed and begin again, each with its own import of torch"
)
def test_torchrun_starts_again_what_was_killed_and_stops_when_asked(tmp_path):
    config = dataclasses.replace(on(steps=100_000, dp=2, zero=1), validate_every=0, bucket_bytes=4 * 2**20)
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 -m lib.train --dp 2 --zero 1 "
    )
    command += f"{FLAGS} --steps 100000 --validate-every 0 --checkpoint {tmp_path} --checkpoint-every 2 --resume auto"

    def newest(after=0):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if (found := folders.complete(str(tmp_path))) and folders.step_of(found[-1]) > after:
                return folders.step_of(found[-1])
            time.sleep(0.01)
        raise AssertionError(f"no checkpoint after step {after}")

    def workers():
        return {p for p in psutil.Process(process.pid).children() if "lib.train" in p.cmdline()}

    process = subprocess.Popen(
        [sys.executable, *command.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        newest()
        first = workers()
        max(first, key=lambda p: p.pid).kill()
        psutil.wait_procs(first, 20)
        newest(after=newest())
        assert len(workers()) == 2 and not workers() & first
        process.terminate()
        _, err = process.communicate(timeout=30)
    finally:
        for one in psutil.Process(process.pid).children() if process.poll() is None else []:
            one.kill()
        process.kill()
    last = folders.complete(str(tmp_path))[-1]
    assert f"SIGTERM: stopped after step {folders.step_of(last)}; it is saved" in err
    wanted = run(train, 2, dataclasses.replace(config, steps=folders.step_of(last)), True)[0]["losses"]
    assert folders.run_of(last)["losses"] == wanted, "all of them, to the last bit"


# ---- asked to stop --------------------------------------------------------------------------------------------------


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_asked_to_stop_one_process_saves_and_says_so(number, code, tmp_path, monkeypatch, capsys, serial):
    def step(model, tokens, i, config, train_step=train_loop.train_step):
        if i == 2:
            os.kill(os.getpid(), number)
        return train_step(model, tokens, i, config)

    before = [signal.getsignal(one) for one in SIGNALS]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(train_loop, "train_step", step)
        main([*FLAGS.split(), "--checkpoint", str(tmp_path)])
    err = capsys.readouterr().err
    assert left.value.code == code and os.listdir(tmp_path) == ["step-00000003"]
    said = f"{number.name}: stopped after step 3; it is saved, and --resume auto continues from there"
    assert err.strip() == f"python -m lib.train: {said}"
    assert before == [signal.getsignal(one) for one in SIGNALS]
    report = tmp_path / "report.json"
    main([*FLAGS.split(), "--checkpoint", str(tmp_path), "--resume", "auto", "--report", str(report)])
    assert json.loads(report.read_text())["losses"] == serial[0]["losses"]
    assert [tuple(x) for x in json.loads(report.read_text())["ranks"][0]["validation"]] == serial[0]["validation"]


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals are sent to processes")
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_all_ranks_stop_after_the_same_step(number, code, tmp_path, capsys):
    def ask():
        until = time.monotonic() + 20
        while not folders.complete(str(tmp_path)) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    asks = threading.Thread(target=ask)
    asks.start()
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), *f"--steps 100000 --dp 2 --checkpoint {tmp_path} --checkpoint-every 1".split()])
    asks.join()
    err = capsys.readouterr().err
    assert left.value.code == code and "it is saved" in err
    newest = folders.complete(str(tmp_path))[-1]
    assert f"stopped after step {folders.step_of(newest)}; " in err
    assert len(json.loads(open(f"{newest}/run.json").read())["losses"]) == folders.step_of(newest)


def test_a_file_is_a_wish_to_stop(tmp_path):
    def asked(world, config, checkpoints):
        if world.rank == 0:
            (tmp_path / "stop").write_text("2")  # before it begins: left by another run, and removed
        original = train_loop.train_step

        def step(model, tokens, i, config):
            if world.rank == 1 and i == 2:
                (tmp_path / "stop").write_text(str(int(signal.SIGTERM)))
            return original(model, tokens, i, config)

        train_loop.train_step = step
        return train(world, config, True, checkpoints)

    reports = run(asked, 2, on(steps=50, dp=2), Checkpoints(str(tmp_path)))
    assert {report["stopped_by"] for report in reports} == {signal.SIGTERM}
    assert {len(report["losses"]) for report in reports} <= {3, 4} and len({len(r["losses"]) for r in reports}) == 1


def link(path):
    path.symlink_to("nowhere")


MADE_BY_HAND = {  # how somebody makes `stop` -> the signal that is said
    "touch": (lambda path: path.touch(), signal.SIGTERM),
    "a word": (lambda path: path.write_text("please\n"), signal.SIGTERM),
    "a known number": (lambda path: path.write_text(" 2\n"), signal.SIGINT),
    "SIGKILL": (lambda path: path.write_text("9"), signal.SIGTERM),
    "zero": (lambda path: path.write_text("0"), signal.SIGTERM),
    "below zero": (lambda path: path.write_text("-15"), signal.SIGTERM),
    "huge": (lambda path: path.write_text("1" * 9999), signal.SIGTERM),
    "a fraction": (lambda path: path.write_text("15.0"), signal.SIGTERM),
    "other digits": (lambda path: path.write_text("²", encoding="utf-8"), signal.SIGTERM),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), signal.SIGTERM),
    "a folder": (lambda path: path.mkdir(), signal.SIGTERM),
    "a folder with a file": (lambda path: [path.mkdir(), (path / "why").touch()], signal.SIGTERM),
    "a pipe": (os.mkfifo, signal.SIGTERM),
    "a link to nowhere": (link, signal.SIGTERM),
    "a link to a folder": (lambda path: path.symlink_to(path.parent), signal.SIGTERM),
}


@pytest.mark.parametrize("how", MADE_BY_HAND)
def test_stop_is_a_wish_however_it_is_made(how, tmp_path):
    make, number = MADE_BY_HAND[how]
    assert passed_on(str(tmp_path)) == 0
    make(tmp_path / "stop")
    assert passed_on(str(tmp_path)) == number
    if how == "a folder with a file":  # it is not ours to remove, and would stop the next run
        with pytest.raises(CheckpointError, match="stop asks the run to stop, and cannot be removed: move it away"):
            folders.remove_leftovers(str(tmp_path))
        assert (tmp_path / "stop" / "why").exists()
    else:
        folders.remove_leftovers(str(tmp_path))
        assert os.listdir(tmp_path) == []


def denied(*args, **kwargs):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_stop_that_cannot_be_read_is_a_wish(tmp_path, monkeypatch):
    (tmp_path / "stop").write_text("2")
    monkeypatch.setattr(signals, "open", denied, raising=False)
    assert passed_on(str(tmp_path)) == signal.SIGTERM


@pytest.fixture
def touched(tmp_path, monkeypatch):
    """In step 2 and later, somebody touches `stop` in the folder of the run."""

    def step(model, tokens, i, config, train_step=train_loop.train_step):
        if i >= 2:
            (tmp_path / "stop").touch()
        return train_step(model, tokens, i, config)

    monkeypatch.setattr(train_loop, "train_step", step)
    return tmp_path


def test_touch_stop_saves_and_says_so(touched, capsys):
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), "--checkpoint", str(touched)])
    assert left.value.code == 143 and {*os.listdir(touched)} == {"step-00000003", "stop"}
    assert "SIGTERM: stopped after step 3; it is saved, and --resume auto continues" in capsys.readouterr().err


def test_after_touch_stop_torchrun_does_not_start_again(touched, monkeypatch):
    """Any code but 0 is a failure to torchrun; a save that failed is one."""
    monkeypatch.setattr(train_command, "of_torchrun", lambda: (0, 1))
    monkeypatch.setattr(train_command, "init", lambda **_: Group())
    monkeypatch.setattr(train_command, "close", lambda world, report: [report])
    codes = []
    for full in (False, True):
        if full:
            monkeypatch.setattr(FileSystemWriter, "write_data", lambda *_: 1 / 0)
        with pytest.raises(SystemExit) as left:
            main([*FLAGS.split(), "--checkpoint", str(touched), "--resume", "auto"])
        codes.append(left.value.code)
    assert codes == [0, 143]


def test_ctrl_c_where_its_file_cannot_be_written(tmp_path, capsys):
    """In the process that started the ranks: an error there would end them without a save."""
    for place, says in (
        (tmp_path, ""),
        (tmp_path / "none", "stop could not be written, so the run goes on: No such"),
    ):
        (tmp_path / "stop").mkdir(exist_ok=True)
        with saver.pass_on(str(place)):
            os.kill(os.getpid(), signal.SIGTERM)
        assert says in capsys.readouterr().err
    assert passed_on(str(tmp_path)) == signal.SIGTERM


# ---- wrong use ------------------------------------------------------------------------------------------------------


def refused(flags, capsys):
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), *flags.split()])
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.count("\n") == 1 and err.startswith("python -m lib.train: ")
    return err.removeprefix("python -m lib.train: ").strip()


@pytest.fixture
def saved(serial, tmp_path):
    """A folder with two copies of a checkpoint, as after steps 4 and 6."""
    for step in (4, 6):
        shutil.copytree(serial[1], tmp_path / f"step-{step:08d}")
    return tmp_path


def edit_run(path, **changes):
    file = path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    note_again(path, "run.json")


def note_again(path, name):
    """The checksum of a file that was changed on purpose."""
    sums = (path / CHECKSUMS).read_text().splitlines(True)
    (path / CHECKSUMS).write_text("".join(line for line in sums if line.split()[1] != name))
    note_checksums(str(path), {name: checksum(str(path), name)})


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--checkpoint-every 2", "--checkpoint-every needs a folder: also give --checkpoint DIR"),
        ("--resume auto", "--resume needs a folder"),
        ("--checkpoint {saved} --checkpoint-every 0", "--checkpoint-every 0 must be a whole number of at least 1"),
        ("--checkpoint {saved} --keep 0", "--keep 0 must be"),
        (
            "--checkpoint {saved}",
            "{saved} has checkpoints up to step 6: continue from there with --resume auto, or give",
        ),
        (
            "--checkpoint {new} --resume {saved}",
            "{saved} is not a checkpoint: its run.json cannot be read: No such file",
        ),
        (
            "--checkpoint {new} --resume /no/such",
            "/no/such is not a checkpoint: its run.json cannot be read: No such file",
        ),
        ("--checkpoint /proc/nowhere", "--checkpoint /proc/nowhere cannot be written: No such file"),
        ("--checkpoint {saved}/step-00000006/run.json", "run.json cannot be written: File exists"),
        (
            "--checkpoint {saved} --resume auto --d-model 32",
            "is of a different model: embed.token.weight has shape [256, 24] there, and shape [256, 32] here",
        ),
        (
            "--checkpoint {saved} --resume auto --num-layers 5",
            "blocks.4.norm1.weight has no such parameter there, and shape [24] here",
        ),
        ("--checkpoint {saved} --resume auto --num-layers 3", "has shape [24] there, and no such parameter here"),
        (
            "--checkpoint {saved} --resume auto --num-heads 2 --num-kv-heads 1",
            "is of a different model: --num-heads 4 there, and 2 here",
        ),
        ("--checkpoint {saved} --resume auto --steps 5", "has 6 finished steps, more than --steps 5; use more"),
    ],
)
def test_one_clear_sentence_before_anything_starts(flags, says, saved, tmp_path_factory, capsys, nothing_is_trained):
    names = {"saved": saved, "new": tmp_path_factory.mktemp("new")}
    before = sorted(os.listdir(saved))
    assert says.format(**names) in refused(flags.format(**names), capsys)
    assert sorted(os.listdir(saved)) == before, "nothing is lost"


def test_a_path_that_is_older_than_what_is_in_the_folder(saved, capsys, nothing_is_trained):
    edit_run(saved / "step-00000004", step=4)
    said = refused(f"--checkpoint {saved} --resume {saved}/step-00000004", capsys)
    assert "step-00000006 is newer, so a later --resume auto would continue from it" in said


def test_a_newer_version_is_refused_and_left_where_it_is(saved, capsys, nothing_is_trained):
    edit_run(saved / "step-00000006", version=folders.VERSION + 1)
    said = refused(f"--checkpoint {saved} --resume auto", capsys)
    assert said.endswith("step-00000006 has version 3, and this lib reads up to 2; use a newer lib")


def test_what_was_saved_before_there_were_families_is_a_gpt2(saved):
    run = json.loads((saved / "step-00000006" / "run.json").read_text())
    model = {name: value for name, value in run["config"]["model"].items() if name not in ("llama", "d_mlp")}
    edit_run(saved / "step-00000006", config=run["config"] | {"model": model})
    assert folders.choose(str(saved), "auto", on()) == str(saved / "step-00000006")


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json"])
def test_auto_goes_past_what_is_damaged_and_says_so(name, saved, capsys):
    cut(saved / "step-00000006" / name)
    said = refused(f"--checkpoint {saved}/x --resume {saved}/step-00000006", capsys)
    assert f"{name} of" in said and "\n" not in said
    newest = folders.choose(str(saved), "auto", on())
    err = capsys.readouterr().err
    assert newest == str(saved / "step-00000004")
    assert f"{name} of" in err and f"renamed to {saved}/step-00000006.broken; continuing from {newest}" in err
    assert {*os.listdir(saved)} == {"step-00000004", "step-00000006.broken", "x"}
    cut(saved / "step-00000004" / name)
    said = refused(f"--checkpoint {saved} --resume auto", capsys)
    assert said.startswith(f"none of the 1 checkpoints in {saved} is complete: ") and f"{name} of" in said
    assert (saved / "step-00000004").exists(), "it does not begin afresh over them"


def rewrite(path, text):
    """run.json with another text, and its right checksum."""
    (path / "run.json").write_text(text)
    note_again(path, "run.json")


def instead(path, name, make):
    """Another thing in the place of a file, or of the checkpoint."""
    file = path / name if name else path
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    make(file)


def foreign(path):
    (path / ".metadata").write_bytes(b"a pickle of a different torch")
    note_again(path, ".metadata")


DAMAGED = "run.json of {} is damaged: it is not as checksums says"
TOUCHED = {  # what a person, a disk or a program did to a checkpoint -> what is said of it
    "no run.json": (lambda p: (p / "run.json").unlink(), "is not a checkpoint: its run.json cannot be read: No such"),
    "run.json is a folder": (
        lambda p: instead(p, "run.json", os.mkdir),
        "its run.json cannot be read: Is a directory",
    ),
    "it is a file": (lambda p: instead(p, "", lambda f: f.touch()), "its run.json cannot be read: Not a directory"),
    "it is empty": (lambda p: instead(p, "", os.mkdir), "is not a checkpoint: its run.json cannot be read: No such"),
    "an empty run.json": (
        lambda p: (p / "run.json").write_text(""),
        "run.json of {} is damaged: it is not as checksums",
    ),
    "an edited run.json": (
        lambda p: (p / "run.json").write_text("{}"),
        "run.json of {} is damaged: it is not as check",
    ),
    "no JSON": (lambda p: rewrite(p, "step: 6"), "run.json of {} is damaged: it is not JSON"),
    "a list": (
        lambda p: rewrite(p, "[]"),
        "run.json of {} is damaged: it has no valid version, step, ",
    ),
    "no version": (lambda p: edit_run(p, version=None), "run.json of {} is damaged: it has no valid version"),
    "a version in words": (lambda p: edit_run(p, version="1"), "run.json of {} is damaged: it has no valid version"),
    "no model": (lambda p: edit_run(p, config={}), "run.json of {} is damaged: it has no valid config"),
    "no losses": (lambda p: edit_run(p, losses=[]), "run.json of {} is damaged: it has no valid step"),
    "no list of boxes": (lambda p: (p / ".metadata").unlink(), ".metadata of {} is missing"),
    "no data": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp of {} is missing"),
    "short data": (lambda p: cut(p / "__0_0.distcp"), "__0_0.distcp of {} is damaged: it is not as checksums says"),
    "no data at all": (lambda p: os.truncate(p / "__0_0.distcp", 0), "__0_0.distcp of {} is damaged: it is not as"),
    "data is a folder": (
        lambda p: instead(p, "__0_0.distcp", os.mkdir),
        "__0_0.distcp of {} cannot be read: Is a directory",
    ),
    "no checksums": (lambda p: (p / CHECKSUMS).unlink(), "checksums of {} is missing"),
    "empty checksums": (
        lambda p: (p / CHECKSUMS).write_text(""),
        "checksums of {} is damaged: it has no line for run",
    ),
    "a line of checksums": (
        lambda p: (p / CHECKSUMS).write_text("00000000 run.json\nelse\n"),
        "checksums of {} is damaged: line 2 is not a checksum and a name",
    ),
    "no text": (lambda p: (p / CHECKSUMS).write_bytes(b"\xff\n"), "checksums of {} is damaged: it is no text"),
    "checksums is a folder": (
        lambda p: instead(p, CHECKSUMS, os.mkdir),
        "checksums of {} cannot be read: Is a directory",
    ),
}


@pytest.mark.parametrize("how", TOUCHED)
def test_a_checkpoint_that_somebody_touched_is_named_and_passed_over(how, saved, tmp_path_factory, capsys):
    path, (touch, says) = saved / "step-00000006", TOUCHED[how]
    touch(path)
    said = refused(f"--checkpoint {tmp_path_factory.mktemp('new')} --resume {path}", capsys)
    assert says.format(path) in said
    with pytest.raises(SystemExit) as left:
        export([str(path), "--out", str(saved / "w.pt")])
    err = capsys.readouterr().err
    assert left.value.code == 1 and err.count("\n") == 1 and says.format(path) in err
    assert folders.choose(str(saved), "auto", on()) == str(saved / "step-00000004")
    assert says.format(path) in capsys.readouterr().err
    assert {*os.listdir(saved)} == {"step-00000004", "step-00000006.broken"}


def test_broken_ones_keep_different_names(saved, capsys, monkeypatch):
    (saved / "step-00000006.broken" / "of").mkdir(parents=True)  # from an earlier start
    (saved / "step-00000006" / CHECKSUMS).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied"))
        )
        said = refused(f"--checkpoint {saved} --resume auto", capsys)
    assert said.endswith("step-00000006 is broken, and cannot be renamed: Permission denied; move it away")
    assert folders.choose(str(saved), "auto", on()) == str(saved / "step-00000004")
    assert f"renamed to {saved}/step-00000006.broken2; continuing" in capsys.readouterr().err
    assert (saved / "step-00000006.broken" / "of").exists()


def test_a_list_of_boxes_of_another_torch_is_not_renamed(saved, capsys):
    foreign(saved / "step-00000006")
    said = refused(f"--checkpoint {saved} --resume auto", capsys)
    assert ".metadata of " in said and "cannot be read by this torch: " in said
    assert {*os.listdir(saved)} == {"step-00000004", "step-00000006"}


def test_a_run_that_goes_on_with_another_batch_or_rate_says_so(saved, capsys):
    assert folders.choose(str(saved), "auto", on()) and capsys.readouterr().err == ""
    folders.choose(str(saved), "auto", dataclasses.replace(on(), global_batch=48, lr=0.5))
    assert "continues with global_batch=48 (was 24), lr=0.5 (was " in capsys.readouterr().err
    folders.choose(str(saved), "auto", dataclasses.replace(on(zero=1), compute_dtype="bfloat16"))
    assert "continues with compute_dtype=bfloat16 (was None), so the losses" in capsys.readouterr().err
    folders.choose(str(saved), "auto", dataclasses.replace(on(), steps=12, lr_end=0.1, weight_decay=0.2))
    says = "continues with lr_end=0.1 (was 1.0), weight_decay=0.2 (was 0.01), steps=12 (was 6), so the losses differ"
    assert says in capsys.readouterr().err
    folders.choose(str(saved), "auto", dataclasses.replace(on(), steps=12))
    assert capsys.readouterr().err == "", "without a decay more steps change no rate"


def test_a_checkpoint_of_an_older_lib_has_the_defaults(saved, capsys):
    """A lib that had one text, and no schedule, trained as these settings do."""
    path = saved / "step-00000006" / "run.json"
    its = json.loads(path.read_text(encoding="utf-8"))
    for name in ("corpus", "warmup_steps", "lr_end", "weight_decay", "beta1", "beta2"):
        del its["config"][name]
    path.write_text(json.dumps(its | {"version": 1}), encoding="utf-8")
    note_checksums(str(path.parent), {"run.json": checksum(str(path.parent), "run.json")})
    assert folders.choose(str(saved), "auto", on()).endswith("6") and capsys.readouterr().err == ""
    folders.choose(str(saved), "auto", dataclasses.replace(on(), weight_decay=0.2))
    assert "continues with weight_decay=0.2 (was 0.01), so" in capsys.readouterr().err


def test_two_runs_in_one_folder(tmp_path):
    first = Lock(str(tmp_path))
    says = (
        f"{tmp_path} is used by process {os.getpid()} on {socket.gethostname()}: wait until it has ended, or give a"
    )
    for ranks in (1, 2):
        with pytest.raises((CheckpointError, RankError), match=re.escape(says)):
            run(train, ranks, on(dp=ranks), True, Checkpoints(str(tmp_path), resume="auto"))
    first.release()
    with pytest.raises(CheckpointError, match="cannot be written on "):
        Lock("/proc/nowhere")
    Lock(str(tmp_path)).release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_job_in_the_folder_says_one_sentence(ranks, tmp_path, capsys, monkeypatch):
    """One that starts later, and one that starts at the same time, so that its ranks find the lock."""
    first = Lock(str(tmp_path))
    command = f"--dp {ranks} --checkpoint {tmp_path}"
    assert refused(command, capsys).startswith(f"{tmp_path} is used by process {os.getpid()} on ")
    monkeypatch.setattr(folders, "check_can_write", lambda path: None)
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), *command.split()])
    err = capsys.readouterr().err
    assert left.value.code == 1 and err.count("\n") == 1
    assert err.startswith(f"python -m lib.train: {tmp_path} is used by process {os.getpid()} on ")
    first.release()


def test_a_lock_that_somebody_made(tmp_path, capsys):
    (tmp_path / LOCK).mkdir()
    assert f"--checkpoint {tmp_path}/{LOCK} cannot be written on " in refused(f"--checkpoint {tmp_path}", capsys)
    (tmp_path / LOCK).rmdir()
    (tmp_path / LOCK).write_bytes(b"\xff")
    Lock(str(tmp_path)).release()
    assert os.listdir(tmp_path) == []


def test_a_lock_does_not_outlive_its_process(tmp_path):
    def dies(world):
        Lock(str(tmp_path))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError):
        run(dies, 1)
    assert os.listdir(tmp_path) == [LOCK]
    Lock(str(tmp_path)).release()
    assert os.listdir(tmp_path) == []


def test_ranks_whose_folders_are_not_the_same(tmp_path):
    """Each rank in a folder of its own, under one name; then a file that is lost while a checkpoint is written."""

    def apart(world, config, checkpoints):
        files.SEEN_S = 0.1
        os.makedirs(f"{tmp_path}/{world.rank}", exist_ok=True)
        os.chdir(f"{tmp_path}/{world.rank}")
        return train(world, config, True, checkpoints)

    with pytest.raises(RankError, match="--checkpoint here is not one folder: rank 0 does not see what rank 1 wrote"):
        run(apart, 2, on(dp=2), Checkpoints("here"))
    assert not os.listdir(tmp_path / "0" / "here") and not os.listdir(tmp_path / "1" / "here")

    def loses(world, config, checkpoints):
        files.SEEN_S = 0.1
        write = FileSystemWriter.write_data

        def lost(self, plan, planner):
            done = write(self, plan, planner)
            if world.rank == 1:
                os.remove(self.path / "__1_0.distcp")
            return done

        FileSystemWriter.write_data, storage.checksum = lost, lambda folder, name: ""
        return train(world, config, True, checkpoints)

    reports = run(loses, 2, on(steps=1, dp=2), Checkpoints(str(tmp_path / "both")))
    assert "rank 0 cannot read __1_0.distcp: all machines must share the folder" in reports[1]["unsaved"]
    assert os.listdir(tmp_path / "both") == []


def test_what_was_half_written_is_not_there(tmp_path):
    (tmp_path / ".step-00000006").mkdir()
    assert folders.choose(str(tmp_path), "auto", on()) is None
    assert folders.choose(str(tmp_path), None, on()) is None


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json", CHECKSUMS])
def test_a_flipped_bit_is_found_wherever_it_is(name, saved, tmp_path_factory, capsys):
    path, whole = saved / "step-00000006", (saved / "step-00000006" / name).read_bytes()
    for at in (0, 40, len(whole) // 2, len(whole) - 2):
        (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
        with pytest.raises(SystemExit) as left:
            export([str(path), "--out", str(saved / "w.pt")])
        err = capsys.readouterr().err.strip()
        assert left.value.code == 1 and "\n" not in err, err
        assert f"{name} of {path} is damaged" in err or name == CHECKSUMS, err
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), *f"--checkpoint {tmp_path_factory.mktemp('new')} --resume {path}".split()])
    assert left.value.code and "step-00000006" in capsys.readouterr().err


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("how", ["truncated", "swapped", "older", "missing", "no checksums", "fewer checksums"])
def test_other_damage_is_found_on_every_rank(how, tmp_path):
    """Of a run on two ranks, loaded on three."""
    place, files = tmp_path / "a", ["__0_0.distcp", "__1_0.distcp"]
    run(momentum_and_frozen, 2, place, Layout(dp=2, zero=1), 2)
    (tmp_path / "a-2").rename(place)
    match how:
        case "truncated":
            cut(place / files[1])
        case "swapped":
            (place / files[0]).rename(place / "aside")
            (place / files[1]).rename(place / files[0])
            (place / "aside").rename(place / files[1])
        case "older":
            run(momentum_and_frozen, 2, tmp_path / "b", Layout(dp=2, zero=1), 1)
            shutil.copy(tmp_path / "b-1" / files[1], place)
        case "missing":
            (place / files[1]).unlink()
        case "no checksums":
            (place / CHECKSUMS).unlink()
        case "fewer checksums":
            lines = (place / CHECKSUMS).read_text().splitlines(True)
            (place / CHECKSUMS).write_text("".join(line for line in lines if files[1] not in line))
    with pytest.raises(RankError, match="CheckpointError: .*is (damaged|missing)"):
        run(momentum_and_frozen, 3, place, Layout(dp=3, zero=1), 1)


def test_keys_shapes_and_kinds_that_do_not_fit(tmp_path, monkeypatch):
    """As if a different program had written the checkpoint."""
    down, position = "blocks.0.mlp.down.weight", "embed.position.weight"

    def put(**more):
        boxes = {key: {Box((0,) * x.dim(), tuple(x.shape)): x} for key, x in more.items()}
        return lambda found: found | {key: storage.Stored(x.shape, boxes[key]) for key, x in more.items()}

    def drop(*keys):
        return lambda found: {key: x for key, x in found.items() if key not in keys}

    momentum, two, whole = f"optimizer.{down}.momentum_buffer", torch.ones(2), torch.ones(24, 96).long()
    wrongs = {
        "different model: more has shape [2] there, and no such parameter here": put(**{"model.more": two}),
        f"different model: {position} has no such parameter there": drop(f"model.{position}"),
        "this state also has else: ": put(**{"else": two}),
        "this state also has optimizer.more.step: ": put(**{"optimizer.more.step": two}),
        f"this state also has {down}.more: ": put(**{f"optimizer.{down}.more": two}),
        f"this state has no {down}.momentum_buffer": lambda found: put(**{f"optimizer.{down}.more": two})(
            drop(momentum)(found)
        ),
        f"{down}.momentum_buffer has shape [2] instead of [24, 96]": put(**{momentum: two}),
        f"{down}.momentum_buffer is int64 instead of float64": put(**{momentum: whole}),
        f"{down} is int64 instead of float64": put(**{f"model.{down}": whole}),
    }
    contents = storage.contents
    for number, (says, wrong) in enumerate(wrongs.items()):
        place = tmp_path / str(number)
        monkeypatch.setattr(storage, "contents", lambda model, wrong=wrong: wrong(contents(model)))
        momentum_and_frozen(Group(), place, Layout(), 1)
        monkeypatch.setattr(storage, "contents", contents)
        (tmp_path / f"{number}-1").rename(place)
        with pytest.raises(CheckpointError) as caught:
            momentum_and_frozen(Group(), place, Layout(), 1)
        assert says in str(caught.value), says


def test_the_state_of_another_optimizer(saved):
    edit_run(saved / "step-00000006", optimizer="SGD")
    with pytest.raises(CheckpointError, match="step-00000006 has the state of SGD, and this run steps with AdamW"):
        trained(on(), Checkpoints(str(saved), resume=str(saved / "step-00000006")))


@pytest.mark.parametrize(
    "out, says",
    [
        ("{}", "Is a directory"),
        ("{}/none/w.pt", "No such file or directory"),
        ("{}/step-00000006/run.json/w.pt", "Not a directory"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_export_to_where_nothing_can_be_written(out, says, saved, capsys):
    if out == "/dev/full" and not os.path.exists(out):
        pytest.skip("only Linux has a file that is always full")
    with pytest.raises(SystemExit) as left:
        export([str(saved / "step-00000006"), "--out", out.format(saved)])
    said = f"python -m lib.checkpoint: --out {out.format(saved)} could not be written: {says}\n"
    assert left.value.code == 1 and capsys.readouterr().err == said


def test_export_of_sizes_that_make_no_gpt(saved, capsys):
    path = saved / "step-00000006"
    model = json.loads((path / "run.json").read_text())["config"]["model"]
    for change, says in (
        ({"num_heads": 5}, "run.json of {} has no sizes of a GPT: d_model=24 cannot be split over num_heads=5"),
        ({"unknown": 5}, "run.json of {} has no sizes of a GPT: "),
        ({"d_model": 48}, "{} is of a different model: embed.token.weight has shape [256, 24] there"),
    ):
        edit_run(path, config={"model": model | change})
        with pytest.raises(SystemExit) as left:
            export([str(path), "--out", str(saved / "w.pt")])
        err = capsys.readouterr().err
        assert left.value.code == 1 and err.count("\n") == 1 and says.format(path) in err


def test_export_of_what_is_no_checkpoint(saved, capsys):
    for path, says in ((saved, "is not a checkpoint"), (saved / "step-00000006", "is damaged")):
        with contextlib.suppress(FileNotFoundError):
            cut(saved / "step-00000006" / ".metadata")
        with pytest.raises(SystemExit) as left:
            export([str(path), "--out", str(saved / "w.pt")])
        assert left.value.code == 1 and says in capsys.readouterr().err
    assert not (saved / "w.pt").exists()


FILES = """
from types import SimpleNamespace
from lib.checkpoint.storage import files_of
boxes = {i: SimpleNamespace(relative_path=f"__{i}_0.distcp") for i in range(9)}
print(files_of(SimpleNamespace(storage_data=boxes)))
"""


@pytest.mark.thorough("two processes that import torch")
def test_ranks_with_different_hash_seeds_divide_the_same_files():
    """Ranks of torchrun have them, and each checks a part of the files; ranks of `run` come from one process."""
    said = set()
    for seed in ("1", "2"):
        variables = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", FILES], env=variables, capture_output=True, text=True)
        said.add(done.stdout)
    assert len(said) == 1 and str([f"__{i}_0.distcp" for i in range(9)]) in said.pop()
