"""What a seed draws: one cause or two, their places, and a small run of `lib.train` in which they exist."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from course.practise.causes import CAUSES, COSTS, NUMBERS
from lib.layout import Layout
from lib.model import GPTConfig
from lib.training.config import TrainConfig, option

EXERCISES = {"15.1": (NUMBERS,), "15.2": (COSTS,), "15.3": (NUMBERS, COSTS)}  # the groups of their causes
AXES_OF_RUN = ((2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 1, 2), (4, 1, 1))  # dp, pp, tp
HEALTHY = "healthy"
SALT = "debug this run, 40417"  # with which the rows of an exercise have different causes
SIZES = {"context": 32, "d_model": 32, "num_layers": 2, "num_heads": 4, "tied": False}
RUN = {"steps": 5, "global_batch": 8, "bucket_bytes": 32768}


@dataclass(frozen=True)
class Case:
    """One drawn run.

    Args:
        seed: that draws it.
        config: the run of `lib.train`.
        sickness: pairs (cause, place): one or two, or none of a healthy run.
    """

    seed: str
    config: TrainConfig
    sickness: tuple[tuple[str, str], ...]


@cache
def drawn_case(seed: str) -> Case:
    """The case of a seed, the same on every machine.

    Args:
        seed: any word. The number of an exercise, with the letter of a row behind it, draws a case for this exercise,
            and `healthy` a run without sickness.
    """
    drawn = random.Random(f"{SALT} {seed}")  # seeded by a string: hashed

    def one_of(choices: Sequence) -> Any:
        return choices[int(drawn.random() * len(choices))]

    groups = (
        ()
        if seed == HEALTHY
        else EXERCISES.get(re.sub("[A-Z]$", "", seed)) or one_of([(NUMBERS,), (COSTS,), (NUMBERS,), (NUMBERS, COSTS)])
    )
    while True:
        dp, pp, tp = one_of(AXES_OF_RUN)
        layout = Layout(dp=dp, pp=pp, tp=tp, microbatches=one_of((1, 2, 4) if dp < 4 else (1, 2)))
        model = GPTConfig(**SIZES, dropout=one_of((0.0, 0.1)))
        names = [one_of([c.name for c in CAUSES.values() if c.group == group]) for group in groups]
        places = [CAUSES[name].places(layout, model.dropout) for name in names]
        if all(len(possible) > 1 for possible in places):  # or the place would be no question
            sickness = zip(names, map(one_of, places), strict=True)
            return Case(seed, TrainConfig(model, layout, **RUN), tuple(sickness))


def options_text(config: TrainConfig) -> str:
    """The options of a run, as a command line has them."""
    words = []
    for settings in (config.layout, config.model, config):
        plain = type(settings)()
        for name, value in vars(settings).items():
            if name not in ("model", "layout") and value != getattr(plain, name):
                no = option(f"no_{name}") if value is False else option(name)
                words.append(no if isinstance(value, bool) else f"{no} {value}")
    return " ".join(words)
