"""A file of one's own: trained in every layout, or refused in a sentence with numbers and a way out."""

import dataclasses
import hashlib
import json

import pytest
import torch

from lib import data, run
from lib.checkpoint.settings import Checkpoints
from lib.lab.certificate import certify_run
from lib.layout import Layout
from lib.mesh import Group
from lib.model import GPTConfig
from lib.train import TrainConfig, main, planned, train
from lib.training.text import Text
from tests.lib.commands import refused

pytestmark = pytest.mark.usefixtures("one_thread")

FRENCH = "Ça ira, dit l'élève à Noël : où est le cœur ? — là-bas. 🐢\n" * 40
SIZES = "--context 16 --d-model 16 --num-layers 2 --num-heads 2 --steps 3 --global-batch 8 --validate-every 0"


@pytest.fixture
def french(tmp_path):
    path = tmp_path / "french.txt"
    path.write_text(FRENCH, encoding="utf-8")
    return path


def test_characters_are_tokens_and_back():
    tokens, alphabet = data.encode_characters(FRENCH)
    assert alphabet == "".join(sorted(set(FRENCH))) and tokens.dtype == torch.int32
    assert "".join(alphabet[i] for i in tokens.tolist()) == FRENCH
    corpus = data.load(FRENCH.encode(), by_character=True)
    assert corpus.decode([*corpus.train.tolist(), *corpus.validation.tolist()]) == FRENCH
    assert corpus.num_tokens == len(set(FRENCH)) == 31
    assert len(data.encode_characters("")[0]) == 0
    every = data.load("".join(map(chr, range(32, 1032))).encode(), by_character=True)
    assert every.num_tokens == 1000 and every.train.max() > 255  # more than a byte can number


def test_bytes_are_tokens_of_any_file():
    raw = bytes(range(256)) * 4
    corpus = data.load(raw)
    assert bytes([*corpus.train.tolist(), *corpus.validation.tolist()]) == raw and corpus.num_tokens == 256
    assert corpus.decode([0x61, 0xC3, 0xA9, 0xFF]) == "aé�"


@pytest.mark.parametrize("tokens", ["bytes", "characters"])
def test_a_text_with_accents_is_learnt(tokens, french, tmp_path, capsys):
    report = tmp_path / "report.json"
    flags = [*SIZES.split(), "--text", str(french), "--tokens", tokens, "--steps", "30", "--report", str(report)]
    main([*flags, "--lr", "0.01", "--validate-every", "30"])
    out = capsys.readouterr().out
    assert f"nats per {tokens[:-1]} in the first step" in out and f"({tokens[:-1]} frequencies alone give" in out
    (rank,) = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    assert rank["losses"][-1] < rank["losses"][0] - 1
    assert rank["config"]["corpus"]["sha256"] == hashlib.sha256(french.read_bytes()).hexdigest()
    assert rank["config"]["model"]["vocab_size"] == {"bytes": 256, "characters": 64}[tokens]


def test_what_is_no_text_is_trained_as_bytes_and_refused_as_characters(tmp_path, capsys):
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4)
    main([*SIZES.split(), "--text", str(path)])
    assert "loss: 5.5" in capsys.readouterr().out
    said = refused([*SIZES.split(), "--text", str(path), "--tokens", "characters"], capsys)
    assert said == (
        f"--text {path} is not UTF-8, in which characters are read here: its byte 0 is 0x89; use --tokens bytes, which "
        "takes any file, or convert it, such as with iconv"
    )


@pytest.mark.parametrize("tokens", ["bytes", "characters"])
def test_a_file_that_is_too_short(tokens, tmp_path, capsys, nothing_is_trained):
    path, flags = tmp_path / "short.txt", ["--tokens", tokens, "--text"]
    shorter = ", or --context {} or less".format
    for length, kept, way_out in ((3, 0, ""), (649, 64, shorter(63)), (20, 2, shorter(1))):
        path.write_text("é" * length if tokens == "characters" else "e" * length, encoding="utf-8")
        assert refused([*flags, str(path)], capsys) == (
            f"--text {path} has {length} {tokens}, of which the last tenth, {kept}, is kept for validation; a sequence "
            f"of --context 64 tokens and its last target need 65 there: give a file of 650 or more{way_out}"
        )
    path.write_text("é" * 650, encoding="utf-8")  # what the sentence asks for is enough
    assert Text(str(path), tokens).read(64).load().validation.numel() >= 65
    path.write_text("e" * 20)
    assert Text(str(path), tokens).read(1).sha256  # and so is its other way out
    path.write_text("")
    assert f"has 0 {tokens}, " in refused([*flags, str(path)], capsys)


def test_what_cannot_be_read(tmp_path, capsys, nothing_is_trained):
    assert refused(["--text", str(tmp_path / "none")], capsys).endswith(
        "none cannot be read: No such file or directory"
    )
    assert refused(["--text", str(tmp_path)], capsys).startswith(f"--text {tmp_path} is no regular file: each rank ")
    with pytest.raises(ValueError, match="tokens='words' must be one of bytes, characters"):
        Text(tokens="words")
    with pytest.raises(ValueError, match="sample=-1 must be"):
        Text(sample=-1)


def test_a_file_that_changes_while_a_run_starts(french):
    text = Text(str(french)).read(16)
    french.write_text(FRENCH + "!", encoding="utf-8")
    with pytest.raises(ValueError, match="has changed since the run was started; start it again"):
        text.load()
    assert Text(str(french)).read(16).load().validation.numel() > 0


def test_a_plan_counts_the_text_and_its_vocabulary(french):
    text = Text(str(french), "characters").read(16)
    config = TrainConfig(GPTConfig(vocab_size=text.vocab_size(), context=16), corpus=text)
    assert planned(config).corpus_bytes == 4 * len(FRENCH) and config.model.vocab_size == 64


LAYOUTS = {
    1: [{}],
    2: [
        {"dp": 2, "zero": 3},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "schedule": "zb-h1", "microbatches": 2},
    ],
    4: [{"dp": 2, "tp": 2, "zero": 2}],
}


def of_all_layouts(world, config, which):
    """Losses and distances from one process of each layout."""
    each = [dataclasses.replace(config, layout=Layout(**layout)) for layout in which]
    return [(train(world, one, True)["losses"], certify_run(world, one)) for one in each]


@pytest.mark.thorough("up to four ranks", keep=2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_is_one_process_with_a_text_a_schedule_and_weight_decay(ranks, french):
    text = Text(str(french), "characters").read(8)
    model = GPTConfig(text.vocab_size(), context=8, d_model=16, num_layers=2, num_heads=2, dropout=0.1)
    own = {"lr": 0.02, "warmup_steps": 2, "lr_end": 0.1, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95}
    config = TrainConfig(model, corpus=text, steps=5, global_batch=8, dtype="float64", **own)
    ((losses, apart),) = of_all_layouts(Group(), config, [{}])
    assert apart.holds() and losses == sorted(losses, reverse=True)
    for found in run(of_all_layouts, ranks, config, LAYOUTS[ranks]):
        for theirs, apart in found:
            assert theirs == pytest.approx(losses, rel=1e-11) and apart.holds()


# ---- to continue ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_knows_its_text(french, tmp_path, capsys):
    runs, other = str(tmp_path / "runs"), tmp_path / "other.txt"
    other.write_text(FRENCH.replace("Noël", "Pâques"), encoding="utf-8")
    flags = [*SIZES.split(), "--checkpoint", runs, "--resume", "auto"]
    main([*flags, "--text", str(french)])
    capsys.readouterr()
    sha = {path: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in (french, other)}
    here = f"{runs}/step-00000003 was trained on {french} (SHA-256 {sha[french]})"
    for more, reads in (
        ([], "the little stories"),
        (["--text", str(other)], f"{other} (SHA-256 {sha[other]})"),
        (["--text", str(french), "--tokens", "characters"], f"the characters of {french} (SHA-256 "),
    ):
        assert refused([*flags, *more], capsys).startswith(f"{here}, and this run reads {reads}")
    french.rename(tmp_path / "moved.txt")  # the same text under another name
    main([*flags, "--text", str(tmp_path / "moved.txt"), "--steps", "4"])
    assert "in step 4" in capsys.readouterr().out


def test_a_text_needs_the_same_words_to_continue_from_the_stories(french, tmp_path, capsys):
    flags = [*SIZES.split(), "--checkpoint", str(tmp_path / "runs"), "--resume", "auto"]
    main(flags)
    capsys.readouterr()
    said = refused([*flags, "--text", str(french)], capsys)
    assert f"was trained on the little stories, and this run reads {french}" in said
    run_json = tmp_path / "runs" / "step-00000003" / "run.json"
    assert json.loads(run_json.read_text())["version"] == 2


def test_a_schedule_goes_on_where_it_was(tmp_path):
    """Equal to a bit in one process: the rate of a step is a function of its number."""
    model = GPTConfig(context=8, d_model=16, num_layers=1, num_heads=2)
    own = {"lr": 0.02, "warmup_steps": 2, "lr_end": 0.1, "weight_decay": 0.3, "beta1": 0.8}
    config = TrainConfig(model, steps=6, global_batch=4, dtype="float64", **own)
    folder, whole = str(tmp_path / "runs"), train(Group(), config, True)["losses"]
    train(Group(), config, True, Checkpoints(folder, checkpoint_every=3, keep=9))
    resumed = train(Group(), config, True, Checkpoints(str(tmp_path / "b"), resume=f"{folder}/step-00000003"))
    assert len(resumed["step_s"]) == 3 and resumed["losses"] == whole
