"""The training loop: the same run whatever the layout, a report that adds up, and a command line that fails well."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.nn.functional import cross_entropy

from lib import cost, data, run
from lib import train as train_module
from lib.lab.certificate import Apart, batches_to_certify
from lib.launch import RankError
from lib.layout import Layout
from lib.mesh import Group, MeshShape
from lib.model import GPT, GPTConfig
from lib.planner import step_memory, step_traffic
from lib.train import TrainConfig, main, planned, train
from lib.training import loop as train_loop
from tests.on_time import on_time

TINY = GPTConfig(context=16, d_model=24, num_layers=3, num_heads=2, dropout=0.1)
SIZES = {"steps": 4, "global_batch": 24, "dtype": "float64", "validate_every": 2, "bucket_bytes": 20_000}
FLAGS = "--context 16 --d-model 24 --num-layers 3 --num-heads 2 --steps 4 --global-batch 24 --dtype float64"
FLAGS += " --validate-every 2"


pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(model=TINY, **others):
    return TrainConfig(model=model, **SIZES | others)


@pytest.fixture(scope="module")
def serial():
    return train(Group(), config_of(), quiet=True)


def on(**layout):
    return config_of(layout=Layout(**layout))


def same(a, b):
    return a["losses"] == pytest.approx(b["losses"], rel=1e-12) and [x for _, x in a["validation"]] == pytest.approx(
        [x for _, x in b["validation"]], rel=1e-12
    )


# Losses, gradients and weights of all other layouts: test_certificate.py; what they send and hold: test_plan.py.
LAYOUTS = [
    {"dp": 2, "zero": 3, "microbatches": 3},
    {"dp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 3},
    {"microbatches": 4},
    {"dp": 3, "zero": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 3, "schedule": "gpipe", "microbatches": 4},
    {"pp": 2, "schedule": "dualpipe-v", "stages_per_rank": 2, "microbatches": 4},
    {"dp": 2, "tp": 2, "zero": 1, "order": "tp,dp,pp"},
    {"tp": 2, "recompute": "selective"},
    {"tp": 2, "sequence_parallel": True, "recompute": "full"},
]


@pytest.mark.thorough("up to four ranks", keep=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_run_whatever_the_layout(serial, layout):
    config = on(**layout)
    reports = run(train, config.layout.num_ranks, config, True)
    assert len(serial["losses"]) == 4 and len(serial["validation"]) == 3
    assert serial["losses"] == sorted(serial["losses"], reverse=True)
    for rank, report in enumerate(reports):
        assert same(report, serial)
        assert report["losses"] == reports[0]["losses"]  # one number, not one for each rank
        assert len(report["step_s"]) == 4 and all(0 < x < 60 for x in report["step_s"])
        assert report["config"] == dataclasses.asdict(config)
        place = MeshShape(**config.layout.sizes).coordinates(rank)
        predicted = step_traffic(planned(config), place["pp"])
        found = {tuple(key.split()): (calls / 4, sent / 4) for key, (calls, sent) in report["traffic"].items()}
        assert found.keys() == predicted.keys()
        if config.layout.recompute != "full":  # with dropout it also repeats the last sum of each block
            assert all(found[key] == pytest.approx(predicted[key], rel=1e-12) for key in found)
        peak = report["peak_bytes"]
        held = step_memory(planned(config), place["pp"], place["dp"], place["tp"])
        exact = ("parameter", "optimizer") if config.layout.zero < 3 else ()
        assert [peak[kind] for kind in exact] == [held[kind] for kind in exact]
        assert max(peak.values()) == peak["total"] <= sum(peak[kind] for kind in peak if kind != "total")


def test_the_first_loss_is_that_of_the_plain_model_on_this_text():
    """Elsewhere `train` is compared with `train`; here with the serial model, on targets cut out of the text."""
    context = 64  # so long a passage is in the text once
    config = config_of(model=dataclasses.replace(TINY, context=context, dropout=0.0), steps=2)
    plain, text = GPT(config.model).double(), data.load().train
    plain.load_state_dict(train_loop.build(Group(), config).full_state_dict())
    rows, _ = data.batch(text, 0, global_batch=24, context=context, seed=config.seed)
    everywhere = bytes(text.tolist())
    places = [everywhere.find(bytes(row.tolist())) for row in rows]
    following = torch.stack([text[place + 1 : place + 1 + context] for place in places]).long()
    right = cross_entropy(plain(rows).flatten(0, 1), following.flatten()).item()
    losses = train(Group(), config, quiet=True)["losses"]
    assert losses[0] == pytest.approx(right, rel=1e-12) and losses[1] < losses[0]


def test_gradients_are_clipped_to_the_norm_of_the_settings():
    config, norms = config_of(max_norm=0.5), []
    model = train_loop.build(Group(), config)
    gradients = [fact.parameter for fact in model.facts]
    model.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.cat([p.grad.flatten() for p in gradients]).norm().item())
    )
    for step in range(2):
        train_loop.train_step(model, data.load().train, step, config)
    assert norms == pytest.approx([0.5, 0.5], rel=1e-5)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("zero", [1, 3])
def test_bfloat16_with_master_weights(serial, zero):
    config = config_of(layout=Layout(zero=zero, dp=2), dtype="float32", compute_dtype="bfloat16")
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
        config = on(zero=zero, dp=dp, pp=world.size // dp, microbatches=2)
        model = train_loop.build(world, config)
        return train_loop.validate(model, data.load().validation, config, limit=2)

    (alone,) = run(losses, 1)
    assert list(run(losses, 3 * pp)) == pytest.approx([alone] * 3 * pp, rel=1e-12)


def test_validation_drops_nothing_and_training_goes_on_dropping():
    config = config_of(model=dataclasses.replace(TINY, dropout=0.5))
    model = train_loop.build(Group(), config)
    model.stages[0].module.blocks[1].eval()  # somebody's choice
    modes = [module.training for module in model.stages[0].module.modules()]
    losses = {train_loop.validate(model, data.load().validation, config, limit=4) for _ in range(3)}
    assert len(losses) == 1, "each look at the same text tells the same"
    assert [module.training for module in model.stages[0].module.modules()] == modes and not all(modes)


@pytest.mark.parametrize("other", [{"seed": 1}, {"model": dataclasses.replace(TINY, dropout=0.0)}])
def test_another_seed_or_dropout_is_another_run(other, serial):
    report = train(Group(), config_of(steps=1, **other), quiet=True)
    assert abs(report["losses"][0] - serial["losses"][0]) > 1e-4


def test_only_the_profiled_step_waits_for_a_gpu(monkeypatch):
    read = []  # how often the clock that waits was read
    monkeypatch.setattr(train_loop, "done_s", lambda: read.append(len(read)) or float(len(read)))
    losses, spans = [], []
    for profile in (False, True):
        config = config_of(validate_every=0, steps=2, global_batch=2)
        report = train(Group(), config, True, None, profile)
        losses.append(report["losses"])
        spans = report["profile"].spans if profile else spans
        assert bool(read) == profile
    assert losses[0] == losses[1]
    assert {span.start_s % 1 for span in spans} == {0.0}, "each span of the last step has this clock"
    assert [span.kind for span in spans][-1] == "optimizer"


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
    apart = Apart(1e-16, 1e-9, 1e-16)
    apart.difference = "step 1: of the gradients all tensors"
    monkeypatch.setattr(train_module, "certify_run", lambda world, config: apart)
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), "--certify"])
    said = capsys.readouterr().out
    assert left.value.code == 1 and "gradient 1e-09" in said and f"the first difference: {apart.difference}" in said


@pytest.mark.thorough("five runs, of two processes or one")
def test_context_parallelism_from_the_terminal(tmp_path, capsys):
    """As one process: it trains, is certified, resumes in a different layout, and is read from a file."""
    cp, place, losses = "--cp 2 --attention ring --token-order zigzag", str(tmp_path / "runs"), []
    with pytest.raises(SystemExit) as left:
        main([*FLAGS.split(), *cp.split(), "--certify"])
    assert left.value.code == 0
    capsys.readouterr()
    main([*FLAGS.split(), *cp.split(), "--save-config"])
    file, report = tmp_path / "run.toml", tmp_path / "report.json"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    for flags in (f"--config {file} --steps 2 --checkpoint {place}", f"--checkpoint {place} --resume auto", ""):
        main([*(FLAGS.split() if "config" not in flags else ()), *flags.split(), "--report", str(report)])
        losses.append(json.loads(report.read_text(encoding="utf-8"))["losses"])
    assert len(losses[0]) == 2 < len(losses[2]) and losses[1] == pytest.approx(losses[2], rel=1e-9)
    assert losses[0] == pytest.approx(losses[2][:2], rel=1e-9)


def test_a_report_of_one_process_without_validation(tmp_path, capsys):
    report = tmp_path / "report.json"
    main([*FLAGS.split(), "--steps", "1", "--validate-every", "0", "--report", str(report)])
    assert "validation" not in capsys.readouterr().out
    (rank,) = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    assert rank["validation"] == [] and rank["traffic"] == {} and rank["peak_bytes"]["optimizer"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_done_says_so(ranks, tmp_path, capsys):
    """Also with a profile, of which there is no step, and with a report, which has the losses of before."""
    command = [*FLAGS.split(), "--dp", str(ranks), "--steps", "3", "--checkpoint", str(tmp_path / "runs")]
    main(command)
    capsys.readouterr()
    profile, report = tmp_path / "profile.json", tmp_path / "report.json"
    main([*command, "--resume", "auto", "--profile", str(profile), "--report", str(report)])
    out = capsys.readouterr().out.strip().splitlines()
    assert "all 3 steps were done before: nothing was left to train" in out
    assert f"profile: {profile} is not written, because no step was left to record" in out
    assert not profile.exists()
    ranks_of_report = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    assert [(len(one["losses"]), one["step_s"]) for one in ranks_of_report] == [(3, [])] * ranks


def test_a_plan_and_a_certificate_leave_a_folder_of_checkpoints_alone(tmp_path, capsys):
    for flags in (["--plan"], ["--certify"]):
        with contextlib.suppress(SystemExit):
            main([*FLAGS.split(), *flags, "--checkpoint", str(tmp_path / "runs"), "--resume", "auto"])
        assert not os.listdir(tmp_path)
        assert capsys.readouterr().err == "nothing is trained, and nothing comes of --checkpoint, --resume\n"


def test_a_certificate_has_seen_a_document_end_where_documents_are_kept_apart():
    """The rare letter is in none of the first steps, whose batches would show nothing."""
    config = GPTConfig(context=8, d_model=8, num_layers=1, num_heads=1, document_end=ord("v"))
    found = batches_to_certify(TrainConfig(config, global_batch=2))
    assert len(found) == 3 and all((inputs[:, :-1] == ord("v")).any() for inputs, _ in found)
    plain = batches_to_certify(TrainConfig(dataclasses.replace(config, document_end=None), global_batch=2))
    assert not any((inputs[:, :-1] == ord("v")).any() for inputs, _ in plain)


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
        ("--dp 1000 --global-batch 1000", "--dp 1000 is more than 64 ranks on one machine"),
        ("--steps 0", "--steps 0 must be"),
        ("--global-batch 0", "--global-batch 0 must be"),
        ("--microbatches 0", "--microbatches 0 must be"),
        ("--validate-every -1", "--validate-every -1 must be"),
        ("--compute-dtype bfloat16", "--compute-dtype needs master weights, which plain data parallelism does not"),
        ("--lr 0", "--lr 0.0 must be"),
        ("--lr nan", "--lr nan must be"),
        (
            "--warmup-steps 100",
            "--warmup-steps 100 leaves none of --steps 100 for the full learning rate; warm up for",
        ),
        ("--lr-end 2", "--lr-end 2.0 must be a fraction of lr, from 0 to 1"),
        ("--weight-decay -1", "--weight-decay -1.0 must be at least 0, and finite"),
        ("--beta2 1", "--beta2 1.0 must be at least 0 and less than 1"),
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
        ("--pp 4", "2 blocks and a head cannot be cut into 4 stages; use 3 stages or fewer"),
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
        ("--dp 40 --pp 2 --global-batch 40", "--dp 40 --pp 2 is more than 64 ranks"),
        ("--sequence-parallel", "--sequence-parallel needs ranks to shard the sequence over"),
        ("--report /no/such/folder/r.json", "--report /no/such/folder/r.json cannot be written"),
        ("--report /", "--report / cannot be written"),
        ("--profile /no/such/folder/p.json", "--profile /no/such/folder/p.json cannot be written"),
        (
            "--profile p.json --steps 2",
            "--profile needs a step after the first two, because they are slow: use --steps 3",
        ),
        ("--plan --certify", "--plan and --certify both take the place of training: give one of them"),
        (
            "--certify --document-end 1",
            "--document-end 1 is inside no sequence of the first 1,000 steps, so that nothing",
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
    with on_time():
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
