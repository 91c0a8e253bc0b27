"""Ten questions of people with a cluster, each answered by one command; its essence is checked by its reasons."""

import json
import re

import pytest

from lib.planner import Layout4D
from lib.planner.__main__ import main
from lib.planner.choices import beyond, usual_choices
from lib.planner.experts import NO_SECONDS_OF_EXPERTS
from lib.planner.training import GPUS, PRESET_MODELS


@pytest.fixture
def ask(capsys):
    """The text that the command prints, in one line; and plain data with `--json`."""

    def answer(question):
        main(question.split())
        said = capsys.readouterr().out
        main([*question.split(), "--json"])
        return re.sub(r"\n  (?=\S)", " ", said), json.loads(capsys.readouterr().out)

    return answer


@pytest.fixture
def refused(capsys):
    def sentence(question):
        with pytest.raises(SystemExit) as end:
            main(question.split())
        assert end.value.code == 2
        return capsys.readouterr().err

    return sentence


def best(plain):
    return Layout4D(**plain["layouts"][0]["layout"])


def seconds(plain):
    return plain["layouts"][0]["seconds"]


def test_a_13b_on_two_slow_nodes(ask):
    """13B at 32k tokens, 16 A100 of 40 GB, 100 Gb/s per node: all that is sent often stays inside a node."""
    question = "--model llama-13b --seq 32768 --gpus 16 --gpu a100-40gb --network-per-node 100Gb"
    said, plain = ask(question)
    layout = best(plain)
    assert layout.tp * layout.cp * layout.dp <= 8 and layout.pp == 2, "only the messages between stages leave a node"
    assert layout.cp * layout.tp > 1 and "between nodes" in said and "fits: " in said
    assert seconds(plain)["tp"] + seconds(plain)["cp"] + seconds(plain)["dp"] < 0.05 * sum(seconds(plain).values())
    assert layout.recompute not in ("none", "full"), "less than all is recomputed"
    _, wide = ask(f"{question} --tp 1 --cp 4 --pp 1 --dp 4 --recompute full --zero 3")
    assert wide["report"]["seconds"]["dp"] > 10 * seconds(plain)["pp"], "ZeRO-3 would wait for this network"


def test_lora_on_24_gb(ask, refused):
    """An 8B: its base in 16 bit leaves a tight rest of 24 GB, and only with a loss in pieces; in 4 bit it fits."""
    said, plain = ask("--model llama3-8b --gpus 1 --gpu rtx4090 --lora 16")
    assert "tight: " in said and "the first needs a loss in 8 pieces" in said and "seconds are not modelled" in said
    held = plain["report"]["places"][0]["held"]
    weights = 2 * PRESET_MODELS["llama3-8b"].num_parameters
    assert held["parameters"] == pytest.approx(weights, rel=0.02) and held["optimizer"] < 0.05 * held["parameters"]
    said, quantized = ask("--model llama3-8b --gpus 1 --gpu rtx4090 --lora 16 --base 4bit")
    assert "fits: " in said and quantized["report"]["places"][0]["held"]["parameters"] < held["parameters"] / 2
    assert "nothing fits" in refused("--model llama3-8b --gpus 1 --gpu rtx4090")


def test_a_70b_in_fp8_on_one_node_of_b200(ask):
    """States of 14 bytes fit on 8 x 180 GB; only tp or a pipeline cuts them; the calibration has no evidence."""
    said, plain = ask("--model llama3-70b --gpus 8 --gpu b200 --fp8")
    layout, states = best(plain), 14 * PRESET_MODELS["llama3-70b"].num_parameters
    assert layout.gpus == 8 and "fits: " in said and states < 8 * GPUS["b200"].memory_bytes
    _, in_16 = ask("--model llama3-70b --gpus 8 --gpu b200")
    speedup = sum(seconds(in_16).values()) / sum(seconds(plain).values())
    assert 1 < speedup < plain["stack"]["fp8_speedup"], "attention and messages are as slow as before"
    assert "calibrated on its only row" in said and "no evidence" in said


def test_8x7b_on_64_h100(ask, capsys):
    main("--model mixtral-8x7b --gpus 64".split())
    said = capsys.readouterr().out
    assert "46.7 billion parameters" in said and "12.88 billion active" in said
    assert re.search(r"^8 +8 ", said, re.MULTILINE) and "fits" in said
    assert NO_SECONDS_OF_EXPERTS[:40] in re.sub(r"\s+", " ", said)


def test_which_batch(ask):
    """Below a batch, the bubble and the gradients are divided among too few sequences."""
    said, plain = ask("--model llama-70b --gpus 64 --sweep batch")
    rates = {row["value"]: row["tokens_per_s_per_gpu"] for row in plain["rows"]}
    assert list(rates) == sorted(rates, reverse=True) and len(rates) == 7 and 1024 in rates
    ordered = [rates[value] for value in sorted(rates)]
    gains = [b / a for a, b in zip(ordered, ordered[1:], strict=False)]
    assert gains == sorted(gains, reverse=True) and gains[-1] < 1.005, "doubling it gains less and less"
    assert "less per GPU: " in said and re.search(" more for (bubble|dp|pp|optimizer): ", said)


def test_half_of_the_network(ask):
    said, plain = ask("--model llama3-8b --gpus 64 --stack fsdp --network 3GB --sweep network")
    at = {row["value"] / 3e9: row for row in plain["rows"]}
    assert at[0.5]["tokens_per_s_per_gpu"] < at[1]["tokens_per_s_per_gpu"] and "more for dp" in at[0.5]["reason"]
    assert at[0.5]["step_s"] < 2 * at[1]["step_s"], "only messages are slower"
    assert "between nodes at" in at[0.5]["reason"] and at[0.5]["reason"] in said


def test_why_it_runs_out_of_memory(ask):
    """The kind of bytes that is too large, the verdict, and layouts that fit."""
    question = "--model llama3-70b --gpus 64 --tp 8 --pp 1 --zero 0 --microbatch 4"
    said, plain = ask(question)
    held = plain["report"]["places"][0]["held"]
    assert "does not fit: " in said and "yours does not fit, so its seconds are compared with none" in said
    total = held.pop("total")
    assert total > 2 * 80e9 and sorted(held, key=held.get)[-2:] == ["optimizer", "activations"]
    found = best(plain)
    assert found.zero > 0 and found.rows < 4, "it shards the one, and keeps less of the other"


def test_405b_on_64(refused, ask):
    """Its states alone are more than 64 cards have; the nearest ways out are true."""
    question = "--model llama3-405b --gpus 64"
    said = refused(question)
    assert (
        14 * PRESET_MODELS["llama3-405b"].num_parameters > 64 * 80e9 and "nothing fits: the smallest layout" in said
    )
    more, memory = re.search(r"use ([\d,]+) GPUs or GPUs of (\d+) GB", said).groups()
    assert 64 < int(more) < 128
    for changed in (f"--model llama3-405b --gpus {more}", f"{question} --memory {memory}GB"):
        text, plain = ask(changed)
        assert re.search("^(fits|tight): ", text, re.MULTILINE)
    needs = beyond(usual_choices("megatron-lm"), best(plain))
    assert not needs or "the first needs" in text, "what Megatron-LM lacks is told"


def test_8b_on_6_gpus(refused, ask):
    """Three divides neither heads, layers nor the batch: a batch that it divides, and the numbers of GPUs next to 6."""
    question = "--model llama3-8b --gpus 6"
    said = refused(question)
    assert "32 layers and 32 heads on 6 GPUs need dp 3 or 6, and a batch of 512 divides by none of them" in said
    batch, fewer, more = re.search(r"use a batch of (\d+) sequences, (\d+) GPUs or (\d+) GPUs", said).groups()
    assert int(batch) % 6 == 0 and abs(int(batch) - 512) < 6 and (fewer, more) == ("4", "8")
    for changed in (
        f"{question} --batch {batch}",
        f"--model llama3-8b --gpus {fewer}",
        f"--model llama3-8b --gpus {more}",
    ):
        assert re.search("^(fits|tight): ", ask(changed)[0], re.MULTILINE)


def test_days_and_money(ask):
    said, plain = ask("--model llama3-70b --gpus 256 --tokens 15T --price 2.5")
    answers = plain["report"]["answers"]
    assert answers["gpu_hours"] == pytest.approx(15e12 / answers["tokens_per_s"] / 3600 * 256)
    assert answers["money"] == pytest.approx(2.5 * answers["gpu_hours"])
    assert (
        f"{answers['days']:,.1f} days, {answers['gpu_hours']:,.0f} GPU hours, {answers['money']:,.0f} at 2.5" in said
    )
    assert re.search(r"\d s ± [\d.]+ % \(median of \d+ published", said), "the seconds have an error"


# ---- wrong and absurd input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("--model llama3-8b --gpsu 8", "unrecognized arguments: --gpsu 8; or did you mean --gpu or --gpus"),
        ("--model llama3-8b --gpus eight", "eight must be a whole number"),
        ("--model llama3-8b --gpus 8 --sweep gpu", "invalid choice: 'gpu'"),
        ("--model llama3-8b --gpus 1000003", "1,000,003 GPUs"),
        ("--model llama3-8b --gpus 8 --tp 99999", "choose tp 1, 2, 4 or 8"),
        ("--model llama3-8b --gpus 8 --memory 1GB", "nothing fits"),
        ("--model llama3-8b --gpus 8 --seq 1000000000", "nothing fits"),
    ],
)
def test_absurd_input_is_one_sentence(question, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(question.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and words in said and said.count("\n") == 1 and "Traceback" not in said
