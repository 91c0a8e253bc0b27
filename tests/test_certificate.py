"""Every layout of 1, 2, 4 and 8 ranks is the same training as one process; and each classic mistake is seen."""

import sys
from dataclasses import replace
from itertools import product

import cloudpickle
import pytest
import torch

from lib import run
from lib.certificate import certify
from lib.layout import Layout
from lib.mistakes import MISTAKES, planted
from lib.model import GPT, GPTConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CONFIG = GPTConfig(vocab_size=16, context=8, d_model=16, num_layers=3, num_heads=8)
DEEP = replace(CONFIG, num_layers=7)  # for more than four stages
ROWS, STEPS = 16, 3
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def layouts(ranks):
    """All that can be on eight stages: degrees, slices of the sequence, schedules, ZeRO."""
    found = []
    degrees = [d for d in product((1, 2, 4, 8), repeat=3) if d[0] * d[1] * d[2] == ranks]
    for (dp, pp, tp), slices, zero, (schedule, per_rank) in product(
        degrees, (False, True), (0, 1, 2), SCHEDULES.items()
    ):
        if (slices and tp == 1) or (pp == 1 and schedule != "1f1b") or pp * per_rank > DEEP.num_layers + 1:
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


def gpt(config=CONFIG):
    """In float64, with biases and norms that are not all 0 and 1."""
    torch.manual_seed(0)
    model = GPT(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def batches(config=CONFIG):
    """Rows of which some have few tokens that count, and one has none: local means are not the mean."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(config.vocab_size, (ROWS, config.context + 1))
        targets = tokens[:, 1:].clone()
        targets[: ROWS // 4, 2:], targets[6] = -100, -100
        yield tokens[:, :-1], targets


def certified(world, which, config=CONFIG):
    return certify(world, which, gpt(config), list(batches(config)), max_norm=0.1)


def of_two_depths(world, shallow, deep):
    return certified(world, shallow) + certified(world, deep, DEEP)


@pytest.mark.slow("hundreds of layouts, each three steps of as many processes: two minutes together")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_layout_is_the_same_training(ranks, say):
    which = sorted(layouts(ranks), key=lambda layout: layout.num_stages > CONFIG.num_layers + 1)
    deep = [layout for layout in which if layout.num_stages > CONFIG.num_layers + 1]
    (apart, *others) = run(of_two_depths, ranks, which[: len(which) - len(deep)], deep, timeout_s=300)
    assert all(other == apart for other in others)
    worst = [max(of_kind) for of_kind in zip(*apart, strict=True)]
    say(f"{len(which)} layouts of {ranks} ranks: loss {worst[0]:.1g}, gradient {worst[1]:.1g}, weight {worst[2]:.1g}")
    assert not [(layout, one) for layout, one in zip(which, apart, strict=True) if not one.holds()]


ALL_AXES = [Layout(2, 2, 2, microbatches=2), Layout(2, 2, 2, microbatches=2, sequence_parallel=True)]
DROPS = replace(CONFIG, dropout=0.2)


def with_mistakes(world, config):
    found = {"none": certified(world, ALL_AXES, config)}
    for mistake in MISTAKES:
        with planted(mistake):
            found[mistake] = certified(world, ALL_AXES, config)
    return found


def test_each_classic_mistake_is_seen(say):
    """With dropout: its masks, too, are those of one process."""
    found = run(with_mistakes, 8, DROPS, timeout_s=120)[0]
    assert all(one.holds() for one in found.pop("none"))
    for mistake, (whole, slices) in found.items():
        say(f"{mistake}: {max(whole):.1g}, in slices {max(slices):.1g}")
        seen = [one for one in (whole, slices) if not one.holds()]
        assert len(seen) == 2 or mistake == "norms not summed over tp" and seen == [slices]
        assert all(max(one) > 1e-6 for one in seen), "far above rounding"
