"""Every mechanism is short enough to be played, stays inside its drawing, and its words fit."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from book.figures import mechanisms
from book.figures.mechanisms.context_ring import play_context_ring
from book.figures.mechanisms.cuts import play_cuts
from book.figures.mechanisms.deadlock import play_deadlock
from book.figures.mechanisms.expert_flight import play_expert_flight
from book.figures.mechanisms.fsdp_units import play_fsdp_units
from book.figures.mechanisms.late_messages import play_late_messages
from book.figures.mechanisms.memory_pour import play_memory_pour
from book.figures.mechanisms.pipeline import play_gpipe, play_rounds, play_trays
from book.figures.mechanisms.ring import play_all_reduce
from book.figures.mechanisms.sequence_ribbon import play_sequence_parallel
from book.figures.mechanisms.split_all_reduce import play_split_all_reduce
from book.figures.mechanisms.split_backward import play_split_backward
from book.figures.mechanisms.tensor_terms import play_tensor_parallel
from book.figures.mechanisms.zero_stages import play_zero_stages
from lib.cost.sizes import MODELS, RECIPES
from lib.cost.steps import ALL_REDUCE
from tests.book.drawn import check_drawing, check_inside, collisions
from tests.book.test_mechanism_buckets import MIB, play
from tests.book.test_mechanism_cuts import CUTS
from tests.book.test_mechanism_fsdp_units import SIZES
from tests.book.test_mechanism_tensor_terms import MATRICES

MESSAGES = ["x of 0", "x of 1", "y of 2", "∂y 3"]
UNITS = [SIZES, SIZES[:4], [1.05e9, *[0.4e9] * 3], [2e9, *[41e9] * 4]]
SHAPES = [("175B", 1, 8), ("175B", 4, 2), ("70B", 1, 4)]
PLAYED = [
    *((play, bucket * MIB) for bucket in (2, 3, 13)),
    *((play_context_ring, n) for n in (2, 3, 4)),
    (play_cuts, CUTS),
    *((play_deadlock, MESSAGES[:n]) for n in (2, 3, 4)),
    (play_expert_flight,),
    *((play_fsdp_units, sizes, n) for sizes in UNITS for n in (2, 4, 8)),
    *((play_late_messages, m, latency) for m, latency in ((6, 0.5), (4, 0.25))),
    *((play_memory_pour, "7B", room) for room in (80e9, 192e9)),
    *((play_sequence_parallel, MODELS[model], rows, tp) for model, rows, tp in SHAPES),
    *((play_split_all_reduce, n) for n in (2, 3, 4)),
    (play_split_backward, 4, 5),
    (play_tensor_parallel, *MATRICES),
    *((play_zero_stages, n, RECIPES[r]) for n in (2, 3, 4, 8) for r in ("mixed Adam", "fp32 Adam")),
]
# Bars that grow have no room for their words yet; larger than their words, where a model has too many layers.
INSIDE = [
    *((play_gpipe, p, m) for p, m in ((4, 6), (2, 2))),
    *((play_trays, p, m) for p, m in ((4, 6), (3, 8))),
    *((play_rounds, p, m) for p, m in ((2, 4), (4, 8))),
    *((play_memory_pour, model, room) for model in ("70B", "405B") for room in (80e9, 192e9)),
    *((play_all_reduce, algorithm, 4) for algorithm in ALL_REDUCE),
]


def named(case) -> str:
    return case[0].__name__


@pytest.mark.parametrize("case", PLAYED, ids=named)
def test_it_is_short_and_its_words_fit(case):
    make, *arguments = case
    check_drawing(make(*arguments))


@pytest.mark.parametrize("case", INSIDE, ids=named)
def test_it_stays_inside(case):
    make, *arguments = case
    check_inside(make(*arguments))


BOXES = ("forward", "comm", "frame", "outline", "bad", "plain", "idle")
KINDS = ("param", "activation", "gradient", "opt")


@pytest.mark.parametrize(
    ("case", "inks"),
    [
        *(((play_sequence_parallel, MODELS[m], rows, tp), ("comm", "plain")) for m, rows, tp in SHAPES),
        ((play_tensor_parallel, *MATRICES), ("forward", "param", "comm", "plain", "outline")),
        ((play_tensor_parallel, *MATRICES), ("plain", "bad")),
        *(((play_context_ring, n), ("comm", "plain", "outline")) for n in (2, 3, 4)),
        ((play_memory_pour, "7B", 80e9), KINDS),
        *(((play_deadlock, MESSAGES[:n]), BOXES) for n in (2, 3, 4)),
    ],
)
def test_nothing_lies_on_anything(case, inks):
    make, *arguments = case
    steps = [step for scene in make(*arguments).scenes for step in scene.frames]
    on_each_other = [pair for step in steps for pair in collisions(step, *inks)]
    assert [pair for pair in on_each_other if not any(name.startswith("dot") for name in pair)] == []


def test_every_mechanism_is_here():
    names = [module.name for module in pkgutil.iter_modules(mechanisms.__path__, f"{mechanisms.__name__}.")]
    there = {name for module in map(importlib.import_module, names) for name in vars(module) if name[:5] == "play_"}
    text = Path(__file__).read_text(encoding="utf-8") + "play_buckets"  # `play` calls it
    assert len(there) > 10 and {name for name in there if name not in text} == set()
