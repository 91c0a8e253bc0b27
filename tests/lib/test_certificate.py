"""Every layout of 1, 2, 4 and 8 ranks is the same training as one process; and each classic mistake is seen."""

import os
import sys
from dataclasses import replace
from itertools import product

import cloudpickle
import pytest
import torch

from book.trials.mistakes import MISTAKES, planted
from lib import run
from lib.cost.sizes import RECOMPUTE
from lib.lab.certificate import certify
from lib.layout import Layout
from lib.model import GPTConfig
from tests.lib.sharding import serial

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CONFIG = GPTConfig(vocab_size=16, context=8, d_model=16, num_layers=2, num_heads=8)
FAMILIES = {  # of the second, eight ranks are more than its heads of keys and values
    "GPT-2": CONFIG,
    "Llama": replace(CONFIG, llama=True, tied=False, num_kv_heads=4, d_mlp=24),
}
MOST_STAGES = (3, 4, 8)
ROWS, STEPS = 16, 2
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def layouts(ranks):
    """All that can be on eight stages: degrees, slices of the sequence, schedules, ZeRO."""
    found = []
    degrees = [d for d in product((1, 2, 4, 8), repeat=3) if d[0] * d[1] * d[2] == ranks]
    for (dp, pp, tp), slices, zero, (schedule, per_rank) in product(
        degrees, (False, True), (0, 1, 2), SCHEDULES.items()
    ):
        if (slices and tp == 1) or (pp == 1 and schedule != "1f1b") or pp * per_rank > max(MOST_STAGES):
            continue
        found.append(
            Layout(
                *(dp, pp, tp),
                schedule=schedule,
                stages_per_rank=per_rank,
                microbatches=min(max(pp, 2), ROWS // dp),
                sequence_parallel=slices,
                zero=zero,
            )
        )
    return found


def batches(config):
    """Rows of which some have few tokens that count, and one has none: local means are not the mean."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(config.vocab_size, (ROWS, config.context + 1))
        targets = tokens[:, 1:].clone()
        targets[: ROWS // 4, 2:], targets[6] = -100, -100
        yield tokens[:, :-1], targets


def certified(world, which, config):
    return certify(world, which, serial(config), list(batches(config)), max_norm=0.1)


def of_each_depth(world, which, config):
    """Which layouts, and how far each is from one process, on a model that is as deep as it has to be."""
    found, least = [], 0
    for most in MOST_STAGES:
        fit = [layout for layout in which if least < layout.num_stages <= most]
        found += zip(fit, certified(world, fit, replace(config, num_layers=most - 1)), strict=True)
        least = most
    return found


@pytest.mark.thorough("eight ranks", keep=3)
@pytest.mark.slow("hundreds of layouts, each two steps of as many processes")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "ranks", "every"),  # so many layouts are tried in `make test`, all in `make certificate`
    [
        *(("GPT-2", 1, 1), ("GPT-2", 2, 2), ("GPT-2", 4, 12)),
        *(("Llama", 1, 1), ("Llama", 2, 5), ("Llama", 4, 16)),
        *(("GPT-2", 8, 30), ("Llama", 8, 61)),
    ],
)
def test_every_layout_is_the_same_training(family, ranks, every, say):
    which = layouts(ranks)
    if "CERTIFICATE" not in os.environ:
        which = which[::every]
    (found, *others) = run(of_each_depth, ranks, which, FAMILIES[family], timeout_s=300)
    assert all(other == found for other in others) and len(found) == len(which)
    worst = [max(of_kind) for of_kind in zip(*(apart for _, apart in found), strict=True)]
    far = "loss {:.1g}, gradient {:.1g}, weight {:.1g}".format(*worst)
    say(f"{family}, {len(which)} layouts of {ranks} ranks: {far}")
    assert not [(layout, apart) for layout, apart in found if not apart.holds()]


def test_a_llama_of_which_much_is_computed_again_or_parameters_are_sharded():
    again = [Layout(tp=2, sequence_parallel=slices, recompute=how) for slices, how in product((0, 1), RECOMPUTE)]
    which = [*again, *(Layout(2, zero=3, microbatches=2, recompute=how) for how in RECOMPUTE)]
    assert all(apart.holds() for apart in run(certified, 2, which, FAMILIES["Llama"])[0])


def test_the_chapter_counts_them():
    assert sum(len(layouts(ranks)) for ranks in (1, 2, 4, 8)) == 252


ALL_AXES = [Layout(2, 2, 2, microbatches=2), Layout(2, 2, 2, microbatches=2, sequence_parallel=True)]
SAYS = {  # of the first step
    "clip counts copies": (
        "loss and gradients are right",
        "it is 1.243 of the right one: copies are counted several",
    ),
    "loss divided by the local count": (
        "and on the ranks 64, 64, 64, 64, 128, 128, 128, 128: each divides by a count",
    ),
    "norms not summed over tp": ("the loss is right, so forward is", "the sum along tp is missing in all"),
    "tied halves added after the clip": ("it is 0.9056 of the right one: some shards, or terms of a sum",),
    "dp group along the wrong axis": ("the loss is right, so forward is", "the sum along dp is missing in blocks.0"),
    "dropout equal over dp": ("the first module with a different output is embed.dropout, so forward",),
}
OF_ITS_BLOCK = ["norms not summed over tp", "dropout equal over dp"]


def with_mistakes(world, config, mistakes):
    found = {"none": certified(world, ALL_AXES, config)}
    for mistake in mistakes:
        with planted(mistake):
            found[mistake] = certified(world, ALL_AXES, config)
    return found


@pytest.mark.thorough("eight ranks", keep=1)
@pytest.mark.parametrize(("family", "mistakes"), [("Llama", OF_ITS_BLOCK), ("GPT-2", list(MISTAKES))])
def test_each_classic_mistake_is_seen_and_said(family, mistakes, say):
    """With dropout: its masks, too, are those of one process."""
    found = run(with_mistakes, 8, replace(FAMILIES[family], dropout=0.2), mistakes, timeout_s=600)[0]
    assert all(one.holds() for one in found.pop("none"))
    for mistake, (whole, slices) in found.items():
        say(f"{family}, {mistake}: {max(whole):.1g}, in slices {max(slices):.1g}")
        seen = [one for one in (whole, slices) if not one.holds()]
        assert len(seen) == 2 or mistake == "norms not summed over tp" and seen == [slices]
        assert all(max(one) > 1e-6 for one in seen), "far above rounding"
        for one, words in product(seen, ("step 1: ", *SAYS[mistake])):
            assert words in one.difference, (mistake, one.difference)
