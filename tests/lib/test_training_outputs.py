"""What a run leaves: a file of its options, a log that grows, a report after Ctrl-C, a sample, the last word."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import torch

from lib import run
from lib.checkpoint.settings import Checkpoints
from lib.layout import Layout
from lib.mesh import Group
from lib.model import GPTConfig
from lib.train import TrainConfig, main, train
from lib.training import loop as train_loop
from lib.training import sample as sample_module
from lib.training.config_file import options_of_file, written_config
from lib.training.step_log import StepLog
from lib.training.stop import Stop
from lib.training.text import Text
from tests.lib.commands import refused
from tests.on_time import on_time

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = "--context 16 --d-model 16 --num-layers 2 --num-heads 2 --global-batch 8 --dtype float64"
TINY = GPTConfig(context=16, d_model=16, num_layers=2, num_heads=2, dropout=0.1)
TINY_RUN = {"corpus": Text(sample=40), "steps": 4, "global_batch": 8, "dtype": "float64", "validate_every": 2}


def tiny_run(**changed):
    return TrainConfig(**{"model": TINY} | TINY_RUN | changed)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- options in a file ----------------------------------------------------------------------------------------------


def test_a_saved_config_is_read_back_to_the_same_run(tmp_path, capsys):
    text = tmp_path / 'a "quoted"\\ name é.txt'
    text.write_text("Once a rank waited. " * 50)
    saved, report = tmp_path / "run.toml", tmp_path / "report.json"
    flags = [*SIZES.split(), "--text", str(text), "--tokens", "characters", "--steps", "3", "--lr", "1e-2", "--llama"]
    flags += ["--warmup-steps", "1", "--lr-end", "0", "--beta1", "0.8", "--num-kv-heads", "1", "--sample", "9"]
    configs = []
    main([*flags, "--save-config"])
    saved.write_text(capsys.readouterr().out, encoding="utf-8")
    for command in (flags, ["--config", str(saved)], ["--config", str(saved), "--steps", "2", "--no-llama"]):
        main([*command, "--report", str(report)])
        written = json.loads(report.read_text())
        configs.append((written["ranks"][0]["config"], written["losses"]))
    assert configs[0] == configs[1]
    changed = configs[2][0]
    assert changed["steps"] == 2 and not changed["model"]["llama"], "the command line wins"
    assert changed["beta1"] == 0.8 and changed["corpus"] == configs[0][0]["corpus"]
    capsys.readouterr()
    main(["--config", str(saved), "--save-config"])
    assert capsys.readouterr().out == saved.read_text(encoding="utf-8")


def test_a_saved_config_keeps_the_layout_and_the_folder(tmp_path, capsys, nothing_is_trained):
    flags = "--dp 2 --tp 2 --sequence-parallel --zero 2 --compute-dtype bfloat16 --checkpoint runs --resume auto"
    main([*flags.split(), "--save-config"])
    its = tomllib.loads(capsys.readouterr().out)
    assert (its["dp"], its["tp"], its["sequence-parallel"], its["zero"]) == (2, 2, True, 2)
    assert (its["checkpoint"], its["resume"], its["compute-dtype"]) == ("runs", "auto", "bfloat16")
    assert "vocab-size" not in its and "sha256" not in its and not os.path.exists("runs")


@pytest.mark.parametrize(
    "text, says",
    [
        ("global_bach = 4", "global_bach is no setting of a run; the nearest is global-batch"),
        ("report = 'r.json'", "report is no setting of a run; the nearest is "),
        ("[model]\ncontext = 3", "model is no setting of a run; the nearest is d-model"),
        ("steps = 1.5", "steps = 1.5 must be a whole number"),
        ("steps = true", "steps = true must be a whole number"),
        ("lr = 'high'", 'lr = "high" must be a number'),
        ("llama = 1", "llama = 1 must be true or false"),
        ("text = 3", 'text = 3 must be a text, such as "a"'),
        ("zero = 4", "zero = 4 must be one of 0, 1, 2, 3"),
        ("schedule = 'afab'", 'schedule = "afab" must be one of "naive", "gpipe", '),
        ("order = 1979-05-27", 'order = "1979-05-27" must be a text'),
        ("d-model = 8\nd_model = 8", "d-model is there twice, with a - and with a _"),
        ("steps: 3", "is not TOML: "),
        (b"\xff", "is not TOML: "),
    ],
)
def test_a_config_that_is_wrong(text, says, tmp_path, capsys, nothing_is_trained):
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refused(["--config", str(path)], capsys)
    assert said.startswith(f"--config {path}") and says in said


def test_a_config_that_cannot_be_read_or_cannot_be(tmp_path, capsys, nothing_is_trained):
    assert (
        refused(["--config", "none.toml"], capsys) == "--config none.toml cannot be read: No such file or directory"
    )
    assert "cannot be read: Is a directory" in refused(["--config", str(tmp_path)], capsys)
    path = tmp_path / "run.toml"
    path.write_text("lr = -1\n")
    assert refused(["--config", str(path)], capsys) == "--lr -1.0 must be a number above 0"


def test_whole_numbers_are_numbers_and_names_may_have_either_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("lr = 1\nglobal_batch = 4\nd-model = 8\n")
    assert options_of_file(str(path)) == {"lr": 1.0, "global_batch": 4, "d_model": 8}
    path.write_text(written_config({"text": 'é"\\\n\x7f🐢', "tied": None, "model": {}}), encoding="utf-8")
    assert options_of_file(str(path)) == {"text": 'é"\\\n\x7f🐢'}


# ---- the log --------------------------------------------------------------------------------------------------------


def test_the_log_has_the_losses_and_rates_of_the_run(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("of an older run\n")
    config = tiny_run(warmup_steps=1)
    report = train(Group(), config, True, log=str(path))
    *steps, last = lines(path)
    assert [line["loss"] for line in steps] == report["losses"]
    assert [line["seconds"] for line in steps] == report["step_s"]
    assert [line["lr"] for line in steps] == pytest.approx([0.0015, 0.003, 0.003, 0.003])
    seen = [(line["step"], line["validation"]) for line in (*steps, last) if "validation" in line]
    assert seen == report["validation"] and [*last] == ["step", "validation"] and last["step"] == 4
    assert train(Group(), config, True)["losses"] == report["losses"], "a log changes no number"


def test_a_log_grows_while_the_run_goes_on_and_when_it_continues(tmp_path, monkeypatch):
    path, seen = tmp_path / "run.jsonl", []

    def step(model, tokens, i, config, train_step=train_loop.train_step):
        seen.append(len(lines(path)))
        return train_step(model, tokens, i, config)

    config, folder = tiny_run(validate_every=0), str(tmp_path / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(train_loop, "train_step", step)
        train(Group(), dataclasses.replace(config, steps=3), True, Checkpoints(folder), log=str(path))
    assert seen == [0, 1, 2], "each line is on its way before the next step"
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')  # cut off
    train(Group(), config, True, Checkpoints(folder, resume=f"{folder}/step-00000003"), log=str(path))
    written = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (*written[:3], *written[4:])] == [0, 1, 2, 3]


def test_a_number_that_is_none_and_a_disk_that_is_full(tmp_path, capsys):
    with StepLog(str(tmp_path / "run.jsonl")) as log:
        log.write(step=0, loss=float("nan"), lr=float("inf"))
    assert lines(tmp_path / "run.jsonl") == [{"step": 0, "loss": "nan", "lr": "inf"}]
    if os.path.exists("/dev/full"):
        main([*SIZES.split(), "--steps", "2", "--validate-every", "0", "--log", "/dev/full"])
        captured = capsys.readouterr()
        assert captured.err.strip() == "--log /dev/full ends here: No space left on device; training goes on"
        assert "in step 2" in captured.out


def test_files_that_cannot_be_written_or_would_be_lost(tmp_path, capsys, nothing_is_trained):
    assert refused(["--log", "/no/such/l"], capsys).startswith("--log /no/such/l cannot be written: give a file name")
    assert refused(["--log", "/"], capsys).startswith("--log / cannot be written")
    text = tmp_path / "text.txt"
    text.write_text("Once a rank waited. " * 50)
    said = refused(["--text", str(text), "--log", str(text)], capsys)
    assert said == f"--log {text} is also the file of --text, and would replace it; give another name"
    assert refused(["--report", "r.json", "--log", "./r.json"], capsys).startswith("--report r.json is also the file")


# ---- asked to stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_report_after_a_signal(number, code, saves, tmp_path, monkeypatch, capsys):
    def step(model, tokens, i, config, train_step=train_loop.train_step):
        if i == 2:
            os.kill(os.getpid(), number)
        return train_step(model, tokens, i, config)

    report, profile, before = tmp_path / "report.json", tmp_path / "profile.json", signal.getsignal(number)
    flags = [*SIZES.split(), "--steps", "9", "--report", str(report), "--profile", str(profile)]
    flags += ["--checkpoint", str(tmp_path / "runs")] * saves
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(train_loop, "train_step", step)
        main(flags)
    captured = capsys.readouterr()
    assert left.value.code == code and signal.getsignal(number) == before
    stayed = "it is saved, and --resume auto continues from there"
    stayed = stayed if saves else "nothing is saved, because there is no --checkpoint"
    said = f"python -m lib.train: {signal.Signals(number).name}: stopped after step 3; {stayed}"
    assert captured.err.strip() == said
    assert f"report: python -m book.figures.report {report} draws it, as far as it came: 3 of 9 steps" in captured.out
    assert f"profile: {profile} is not written, because the last step, which it shows, was not" in captured.out
    written = json.loads(report.read_text())
    assert len(written["losses"]) == 3 and written["ranks"][0]["stopped_by"] == number
    assert "sample" not in written["ranks"][0] and "the model writes" not in captured.out
    whole = train(Group(), tiny_run(model=dataclasses.replace(TINY, dropout=0.0)), True)
    assert written["losses"] == whole["losses"][:3]


@pytest.mark.thorough("a process that imports torch")
@pytest.mark.timed("it presses Ctrl-C, and measures how soon all has ended")
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Ctrl-C is sent to a process group")
def test_ctrl_c_of_two_ranks_leaves_a_report(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-u", "-m", "lib.train", *SIZES.split(), "--dp", "2", "--report", str(report)]
    process = subprocess.Popen(
        [*command, "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen = ""
    while "loss" not in seen and process.poll() is None:
        seen += process.stdout.read(16)
    os.killpg(process.pid, signal.SIGINT)
    pressed_s = time.monotonic()
    out, err = process.communicate(timeout=60)
    ended_s = time.monotonic()
    assert process.returncode == 130, err
    written = json.loads(report.read_text())
    done = len(written["losses"])
    assert done >= 1 and [len(rank["step_s"]) for rank in written["ranks"]] == [done, done]
    said = f"SIGINT: stopped after step {done}; nothing is saved, because there is no --checkpoint"
    assert err.strip() == f"python -m lib.train: {said}" and f"as far as it came: {done} of 100000 steps" in out
    with on_time():
        assert ended_s - pressed_s < 10


def stops_together(world, folder):
    """The step after which each rank stops, if only rank 0 sees the file."""
    with Stop(world, folder) as stop:
        for step in range(5):
            if world.rank == 0 and step == 2:
                with open(os.path.join(folder, "stop"), "w") as file:
                    file.write("2")
            if stop.after_step():
                break
    return step, stop.stopped_by


def test_all_ranks_stop_after_the_same_step(tmp_path):
    assert list(run(stops_together, 3, str(tmp_path))) == [(2, signal.SIGINT)] * 3


# ---- a sample -------------------------------------------------------------------------------------------------------

LAYOUTS = [
    {"dp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "schedule": "1f1b", "microbatches": 2},
]


def samples(world, layouts):
    return [train(world, tiny_run(layout=Layout(**one)), True)["sample"] for one in layouts]


def test_a_sample_is_the_same_text_in_every_layout():
    (alone,) = samples(Group(), [{}])
    assert len(alone) > 20  # bytes that are not UTF-8 become one character
    first, second = run(samples, 2, LAYOUTS)
    assert first == [alone] * 3 and second == [""] * 3


def test_a_sample_is_drawn_from_what_the_model_says():
    """By hand: softmax at the temperature, and the number of each place."""
    config = tiny_run(corpus=Text(tokens="characters", sample=30))
    corpus = config.corpus.load()
    config = dataclasses.replace(config, model=dataclasses.replace(TINY, vocab_size=config.corpus.vocab_size()))
    model = train_loop.build(Group(), config)
    text = sample_module.sample(model, corpus, config)
    assert len(text) == 30 and set(text) <= set(corpus.alphabet), "no token that the text does not have"
    gpt = model.stages[0].module.eval()
    so_far, numbers = [corpus.alphabet.index("\n")], []
    for i, character in enumerate(text):
        with torch.no_grad():
            logits = gpt(torch.tensor([so_far[-16:]]))[0, -1, : len(corpus.alphabet)]
        weights = (logits / sample_module.TEMPERATURE).exp().tolist()
        number = sample_module.random.Random(f"seed 0 token {i}").random() * sum(weights)
        below, token = weights[0], 0
        while below <= number:
            token += 1
            below += weights[token]
        assert corpus.alphabet[token] == character
        so_far.append(token)
        numbers.append(number)
    assert len(set(numbers)) == 30


def test_a_sample_of_a_sick_model_and_of_bytes_that_are_no_text(tmp_path, capsys):
    config = tiny_run(corpus=Text(sample=5))
    model = train_loop.build(Group(), config)
    with torch.no_grad():
        model.stages[0].module.blocks[0].norm1.weight.fill_(float("nan"))
    assert sample_module.sample(model, config.corpus.load(), config) == "nothing: its numbers are not finite"
    (tmp_path / "escapes").write_bytes(b"\x1b[2J\x07" * 200)
    main([*SIZES.split(), "--text", str(tmp_path / "escapes"), "--steps", "60", "--lr", "0.02"])
    out = capsys.readouterr().out
    wrote = out.partition("the model writes:\n")[2].partition("\nloss: ")[0]
    assert "\\x1b[2J\\x07" in wrote and "\x1b" not in wrote and "\x07" not in wrote


def test_no_sample_if_none_is_wanted(capsys):
    main([*SIZES.split(), "--steps", "1", "--sample", "0", "--validate-every", "0"])
    assert "the model writes" not in capsys.readouterr().out
    assert TrainConfig().corpus.sample == 0


# ---- under torchrun -------------------------------------------------------------------------------------------------


def test_the_sentence_is_left_where_torchrun_says_it_last(tmp_path, monkeypatch, capsys, nothing_is_trained):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    for flags, says in (
        (["--dp", "0"], "--dp 0 must be a whole number of at least 1"),
        (["--dp", "x"], "error: argument"),
    ):
        with pytest.raises(SystemExit):
            main(flags)
        message = json.loads(path.read_text())["message"]
        assert message["message"].startswith(f"python -m lib.train: {says}")
        assert message["message"] in capsys.readouterr().err and int(message["extraInfo"]["timestamp"]) > 0


@pytest.mark.thorough("torchrun starts two ranks, each with its own import of torch")
def test_torchrun_ends_with_the_sentence():
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m lib.train --dp 3"
    ended = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=120)
    said = [line for line in ended.stderr.splitlines() if line.strip("= ")]
    sentence = "python -m lib.train: --global-batch 16 cannot be split over --dp 3; use a multiple of 3, such as 18"
    assert ended.returncode == 1 and said[-1].startswith(f"  traceback : {sentence}")
    assert [line for line in said if line.startswith(sentence)], "and where it always was"
