"""Every layout of 1, 2, 4 and 8 ranks is the same training as one process; and each classic mistake is seen."""

import os
import sys
from dataclasses import replace
from itertools import product

import cloudpickle
import pytest
import torch
from sharding import serial

from lib import run
from lib.certificate import certify
from lib.layout import Layout
from lib.mistakes import MISTAKES, planted
from lib.model import GPTConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CONFIG = GPTConfig(vocab_size=16, context=8, d_model=16, num_layers=2, num_heads=8)
DEPTHS = {n: replace(CONFIG, num_layers=n - 1) for n in (3, 4, 8)}  # by the most stages that they can be cut into
ROWS, STEPS = 16, 3
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def layouts(ranks):
    """All that can be on eight stages: degrees, slices of the sequence, schedules, ZeRO."""
    found = []
    degrees = [d for d in product((1, 2, 4, 8), repeat=3) if d[0] * d[1] * d[2] == ranks]
    for (dp, pp, tp), slices, zero, (schedule, per_rank) in product(
        degrees, (False, True), (0, 1, 2), SCHEDULES.items()
    ):
        if (slices and tp == 1) or (pp == 1 and schedule != "1f1b") or pp * per_rank > max(DEPTHS):
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


def batches(config=CONFIG):
    """Rows of which some have few tokens that count, and one has none: local means are not the mean."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(config.vocab_size, (ROWS, config.context + 1))
        targets = tokens[:, 1:].clone()
        targets[: ROWS // 4, 2:], targets[6] = -100, -100
        yield tokens[:, :-1], targets


def certified(world, which, config=CONFIG):
    return certify(world, which, serial(config), list(batches(config)), max_norm=0.1)


def of_each_depth(world, which):
    """Which layouts, and how far each is from one process, on a model that is as deep as it has to be."""
    found, least = [], 0
    for most, config in DEPTHS.items():
        fit = [layout for layout in which if least < layout.num_stages <= most]
        found += zip(fit, certified(world, fit, config), strict=True)
        least = most
    return found


@pytest.mark.slow("hundreds of layouts, each three steps of as many processes")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_layout_is_the_same_training(ranks, say):
    """`make test` takes some of the layouts of 4 and of 8 ranks, `make certificate` all."""
    which = layouts(ranks)
    if "CERTIFICATE" not in os.environ:
        which = which[:: {4: 4, 8: 9}.get(ranks, 1)]
    (found, *others) = run(of_each_depth, ranks, which, timeout_s=300)
    assert all(other == found for other in others) and len(found) == len(which)
    worst = [max(of_kind) for of_kind in zip(*(apart for _, apart in found), strict=True)]
    say(f"{len(which)} layouts of {ranks} ranks: loss {worst[0]:.1g}, gradient {worst[1]:.1g}, weight {worst[2]:.1g}")
    assert not [(layout, apart) for layout, apart in found if not apart.holds()]


def test_the_chapter_counts_them():
    assert sum(len(layouts(ranks)) for ranks in (1, 2, 4, 8)) == 252


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
