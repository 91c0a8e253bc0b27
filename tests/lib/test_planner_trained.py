"""What is trained, and where it is kept: adapters, states of optimizers, offload; by hand, by torch, and by command."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from lib.cost.adapters import BASES, Adapters
from lib.cost.sizes import ADAM_8BIT, OPTIMIZERS, recipe_of_optimizer
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, memory_bytes, step_s
from lib.planner.__main__ import main
from lib.planner.margin import verdict_text
from lib.planner.memory import host_bytes
from lib.planner.search import layouts_by_memory
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

LLAMA_8B = replace(PRESET_MODELS["llama3-8b"], context=2048)
RTX4090 = "--peak 165TF --memory 24GB --memory-bandwidth 1008GB --link 32GB"
ALONE = Layout4D(1, 1, 1, 1, zero=0)


def training(gpus=1, model=LLAMA_8B, stack="megatron", batch=16, **more):
    return Training(model, Cluster(GPUS["h100"], gpus), stack_for(stack, "h100"), batch, **more)


def test_adapters_of_an_8b():
    """41,943,040 parameters of rank 16 on all linear layers of a Llama 3 8B, as PEFT counts them."""
    assert 32 * Adapters(16).block_parameters(LLAMA_8B) == 41_943_040
    h, f, kv = nn.Linear(4096, 4096), nn.Linear(4096, 14_336), nn.Linear(4096, 1024)
    sides = sum(sum(layer.weight.shape) for layer in (h, h, kv, kv, f, f, f))
    assert Adapters(16).block_parameters(LLAMA_8B) == 16 * sides
    split = 2 * (4096 + 1024) + 2 * (4096 + 256) + 3 * (4096 + 3584)
    assert Adapters(16).block_parameters(LLAMA_8B, tp=4) == 16 * split


def test_bytes_of_a_frozen_base():
    assert 8 * BASES["4bit"] == pytest.approx(4.127, abs=1e-3), "QLoRA, section 3"
    own, blocks, ends = 41_943_040, 32 * LLAMA_8B.num_block_parameters, 2 * 128_256 * 4096
    for base, per_weight in BASES.items():
        found = memory_bytes(training(adapters=Adapters(16, base)), ALONE)
        assert found.parameters == pytest.approx(4 * own + per_weight * blocks + 2 * ends)
        assert found.gradients == 4 * own and found.optimizer == 8 * own
        assert found.gathered == (2 * 4096 * 14_336 if base == "4bit" else 0), "a matrix, back in 16 bit"
    run = training(8, adapters=Adapters(16, "4bit"))
    sharded = memory_bytes(run, Layout4D(1, 1, 1, 8, zero=3))
    assert sharded.parameters == pytest.approx((4 * own + BASES["4bit"] * blocks + 2 * ends) / 8)
    assert sharded.gathered == pytest.approx(2 * 128_256 * 4096 + 2 * 4096 * 14_336), "the frozen head, no gradients"
    assert memory_bytes(run, Layout4D(1, 1, 1, 8, zero=1)).optimizer == own


def states(optimizer, parameters):
    """Bytes of the states of a parameter after a step."""
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    tensors = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()]
    return sum(x.numel() * x.element_size() for x in tensors) / sum(one.numel() for one in parameters)


@pytest.mark.parametrize(
    ("name", "make", "dtype"),
    [
        ("adam", torch.optim.AdamW, torch.float32),
        ("adam-bf16", torch.optim.AdamW, torch.bfloat16),
        ("muon", getattr(torch.optim, "Muon", None), torch.float32),
        ("sgd", lambda of: torch.optim.SGD(of, 0.1), torch.float32),
        ("sgd-momentum", lambda of: torch.optim.SGD(of, 0.1, momentum=0.9), torch.float32),
    ],
)
def test_states_that_torch_makes(name, make, dtype):
    if make is None:
        pytest.skip("this torch has no Muon")
    weights = [nn.Parameter(torch.zeros(16, 8, dtype=dtype))]
    assert states(make(weights), weights) == OPTIMIZERS[name][0]


def test_states_of_embedding_and_head_may_be_larger():
    run = training()
    blocks, ends = 32 * LLAMA_8B.num_block_parameters, 128_256 * 4096
    recipe = run.stack.recipe
    for name, (of_blocks, embedding, head) in OPTIMIZERS.items():
        wide = replace(run, stack=replace(run.stack, recipe=recipe_of_optimizer(recipe, name)), optimizer=name)
        states = of_blocks * blocks + (embedding + head) * ends
        copies = recipe.master_bytes * (blocks + 2 * ends)
        assert memory_bytes(wide, ALONE).optimizer == pytest.approx(states + copies)
        eight = replace(wide, cluster=Cluster(GPUS["h100"], 8))
        assert memory_bytes(eight, Layout4D(1, 1, 1, 8, zero=1)).optimizer == pytest.approx((states + copies) / 8)
    assert ADAM_8BIT == 2 + 2 / 64


def test_what_is_offloaded_is_in_the_host():
    layout = Layout4D(1, 1, 1, 8, zero=3)
    here = memory_bytes(training(8), layout)
    for offload, kinds in {
        "optimizer": ("optimizer",),
        "parameters": ("parameters", "gradients", "optimizer"),
    }.items():
        run = training(8, offload=offload)
        there = memory_bytes(run, layout)
        assert there == here._replace(**dict.fromkeys(kinds, 0.0))
        assert host_bytes(run, layout) == pytest.approx(sum(getattr(here, kind) for kind in kinds))
    whole = training(8, offload="parameters", stack="kempner-forge")
    assert memory_bytes(whole, layout).gradients == pytest.approx(4 * LLAMA_8B.num_parameters, rel=1e-4), "on the GPU"


@pytest.mark.parametrize("more", [{"adapters": Adapters(8)}, {"offload": "optimizer"}, {"optimizer": "muon"}])
def test_seconds_are_refused_in_a_sentence(more):
    run = training(8, **more)
    with pytest.raises(ValueError, match="^seconds are not modelled: "):
        best_layouts(run)
    with pytest.raises(ValueError, match="^seconds are not modelled: "):
        step_s(run, Layout4D(1, 1, 1, 8))


def test_layouts_without_seconds_fit_and_tight_ones_come_last():
    run = training(8, adapters=Adapters(16))
    found = layouts_by_memory(run, Choices(), best=10_000)
    is_tight = [held.total > 72e9 for _, held in found]
    assert is_tight == sorted(is_tight) and all(held.total <= 80e9 for _, held in found)
    split = [one.tp * one.cp * one.pp for one, held in found if held.total <= 72e9]
    assert split == sorted(split)
    assert all(one.zero == 3 for one, _ in layouts_by_memory(training(8, offload="parameters"), Choices(), best=99))
    with pytest.raises(ValueError, match="nothing fits"):
        layouts_by_memory(training(adapters=Adapters(16), model=replace(LLAMA_8B, context=131_072)))


def test_the_base_turns_the_verdict():
    card = replace(GPUS["h100"], memory_bytes=24e9)
    run = replace(training(adapters=Adapters(16, "4bit")), cluster=Cluster(card, 1))
    said = verdict_text(run, ALONE)
    assert "of 24.0 GB with adapters of rank 16 on a base in 4 bit; with a base in 16 bit 29.5: does not fit" in said
    wide = replace(run, adapters=Adapters(16))
    assert "on a base in 16 bit; with a base in 4 bit 19.3: fits" in verdict_text(wide, ALONE)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (
            f"--model llama3-8b --gpus 1 {RTX4090} --lora 16 --base 4bit --seq 2048 --batch 16",
            ("fits: 19.3 of 24.0 GB", "layouts that fit, the least split first:", "seconds are not modelled: LoRA"),
        ),
        (f"--model llama3-8b --gpus 1 {RTX4090} --lora 16 --seq 2048 --batch 16", ("fits: 21.2", "recompute full")),
        ("--model llama-13b --gpus 8 --offload parameters --zero 3", ("the host holds 22.8 GB for each GPU",)),
        ("--model llama-13b --gpus 8 --optimizer adam-8bit", ("8.031 bytes per parameter (adam-8bit)", "s per step")),
        (
            "--model llama-13b --gpus 8 --optimizer muon",
            ("10 bytes per parameter (muon)", "seconds are not modelled"),
        ),
        ("--model llama-7b --gpus 8 --optimizer sgd", ("the seconds of sgd are taken to be those of Adam",)),
    ],
)
def test_answered(question, words, capsys):
    main(question.split())
    said = " ".join(capsys.readouterr().out.split())
    assert all(one in said for one in words), said
    assert ("s per step" in said) == ("seconds are not modelled" not in said)
    main([*question.split(), "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert plain["report"]["notes"][0].split(":")[0] in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--base 4bit", "--base 4bit is the precision of a frozen model: give --lora RANK"),
        ("--offload parameters --zero 1", "add --zero 3, or take --offload optimizer"),
        ("--lora 16 --tokens 1T", "--tokens and --price need seconds"),
        ("--lora 0", "whole number"),
        ("--optimizer lion", "invalid choice"),
    ],
)
def test_refused(options, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(f"--model llama-7b --gpus 8 {options}".split())
    assert end.value.code == 2 and words in " ".join(capsys.readouterr().err.split())
