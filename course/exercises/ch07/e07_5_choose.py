"""07.5: how to fit the activations of a stage of Llama 3 405B into three limits, with the numbers that defend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from course.check.exercise import Data, Exercise, Mistake, kind, several
from lib.mesh import Group

H, LAYERS, DEGREES = 16_384, 8, (1, 2, 4, 8)
CASES = {"A": (8192, 12), "B": (8192, 9), "C": (131_072, 22)}  # tokens, GB
WAYS = TP, SP, AGAIN = "tp", "sp", "sp, gathered again"
UNITS = {(TP, False): 8, (SP, False): 8, (AGAIN, False): 10, (TP, True): 10, (SP, True): 11, (AGAIN, True): 13}
INSIDE = 2 * (1 + 2 * 8 / 128) + 2 + 6 * 53_248 / H  # queries, keys, values; output of attention; MLP
Choice = tuple[int, str, bool, float, float]  # t, way, recomputed, GB, sent


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    result = answer()
    found: Data = {"what was returned": kind(result)}
    for name, row in zip(CASES, several(result, len(CASES)), strict=True):
        t, way, recompute, gigabytes, sent = several(row, 5)
        found[f"case {name}: the choice"] = f"t={t}, {way}, {'' if recompute else 'not '}recomputed"
        found |= {f"case {name}: GB": tenth(gigabytes), f"case {name}: sent": tenth(sent)}
    return found


def tenth(number: object) -> object:
    try:
        return round(float(number), 1)
    except (TypeError, ValueError):
        return number


def kept(t: int, way: str) -> float:
    """Bytes per element of x that a layer keeps."""
    return {TP: 8 + INSIDE / t, SP: 4 + (4 + INSIDE) / t, AGAIN: (8 + INSIDE) / t}[way]


def input_of(t: int, way: str) -> float:
    """Bytes per element of the input of a layer that is recomputed."""
    return 2 if way == TP else 2 / t


def costs(
    tokens: int, t: int, way: str, recompute: bool, kept=kept, input_of=input_of, units=UNITS, live=1, twice=0
) -> Choice:
    waiting = (LAYERS - live + twice) * input_of(t, way)  # of the layer that runs, the input is the first tensor kept
    layers = waiting + live * kept(t, way) if recompute else LAYERS * kept(t, way)
    return t, way, recompute, tokens * H * layers / 1e9, units[way, recompute] * (t - 1) / t


def that_fit(tokens: int, most: float, degrees=DEGREES, **how) -> Iterator[Choice]:
    for t in degrees:
        for way, recompute in UNITS:
            choice = costs(tokens, t, way, recompute, **how)
            if choice[3] <= most:
                yield choice


def least_sent(choice: Choice) -> tuple:
    return choice[2], choice[4]


def choose(best: Callable = least_sent, **how) -> Callable:
    """The answer, by a score that the best choice minimises, and with a place for each mistake."""
    return lambda: [min(that_fit(*case, **how), key=best) for case in CASES.values()]


def by_hand():
    return [(4, SP, False, 11.7, 6), (8, SP, False, 8.02, 7), (8, SP, True, 19.8, 9.63)]


def as_one_gpt(t: int, way: str) -> float:
    return {TP: 10 + 24 / t, SP: 4 + 30 / t, AGAIN: 34 / t}[way]


def all_heads(t: int, way: str) -> float:
    """With as many heads for keys and values as for queries."""
    return kept(t, way) + 2 * (1 - 8 / 128) * 2 / t


def inputs_cut(t: int, way: str) -> float:
    return kept(t, TP if way == TP else AGAIN)


def units_alone() -> list[Choice]:
    return [(t, way, recompute, gigabytes, UNITS[way, recompute]) for t, way, recompute, gigabytes, _ in choose()()]


EXERCISE = Exercise(
    id="07.5",
    title="choose",
    points=2,
    body=body,
    inputs=inputs,
    ranks=(1,),
    right=(by_hand, choose()),
    mistakes=(
        Mistake(
            "Your gigabytes are twice too large. The table counts bytes of values in bfloat16, 2 each; they are in it "
            "already.",
            choose(kept=lambda t, way: 2 * kept(t, way)),
        ),
        Mistake(
            "You take 8 units for sequence parallelism that gathers inputs again. Two more all-gathers in backward "
            "make 10: that is its price, and with t = 4 it sends more than t = 8 with full inputs kept.",
            choose(units=UNITS | {(AGAIN, False): 8}),
        ),
        Mistake(
            "You count a GPT layer with dropout, 10 + 24/t. Llama has no masks, and its MLP has three matrices: add up "
            "the rows of the table with its sizes.",
            choose(kept=as_one_gpt),
            about=("GB",),
        ),
        Mistake(
            "You count as many heads for keys and values as for queries, 6 bytes. There are 8 for 128: 2.25 bytes.",
            choose(kept=all_heads),
            about=("GB",),
        ),
        Mistake(
            "For sequence parallelism that keeps its full inputs you divide everything by t. The inputs of the "
            "column-parallel layers, 4 bytes, stay in full on every rank; only gathering them again divides them.",
            choose(kept=inputs_cut),
            about=("GB",),
        ),
        Mistake(
            "Case C: you leave out the layer that is being recomputed. While it runs backward, all that it keeps is "
            "alive, and for so many tokens it is the largest part.",
            choose(live=0),
            about=("case C",),
        ),
        Mistake(
            "Case C: you count one tensor twice. The input of the layer that runs backward is also the first of the "
            "tensors that this layer keeps, so only the inputs of the seven others are added.",
            choose(twice=1),
            about=("case C",),
        ),
        Mistake(
            "You always take t = 8. In case A a smaller group fits as well and sends less: a unit is (t-1)/t of x.",
            choose(degrees=(8,)),
            about=("choice",),
        ),
        Mistake(
            "You take the smallest t that fits. In case B its additional all-gathers send more than a larger t that "
            "keeps the full inputs: compare units · (t-1)/t.",
            choose(lambda choice: (choice[2], choice[0], choice[4])),
            about=("choice",),
        ),
        Mistake(
            "You take the choice that keeps least. A limit that holds is enough; memory that is left over buys "
            "nothing, and the bytes that you send for it cost time.",
            choose(lambda choice: (choice[2], choice[3])),
            about=("choice",),
        ),
        *(
            Mistake(
                "You recompute where something fits without. Full recomputation costs a third more compute in every "
                "step: it is the last resort, only case C needs it.",
                choose(best),
                about=("choice",),
            )
            for best in (lambda choice: choice[4], lambda choice: choice[3])
        ),
        Mistake(
            "Your units under recomputation count the second forward to its end. It stops when every tensor that "
            "backward needs is recomputed, before the last collective.",
            choose(units=UNITS | {(TP, True): 12, (SP, True): 12, (AGAIN, True): 14}),
            about=("sent",),
        ),
        Mistake(
            "You return units. A unit is (t-1)/t of bsh elements: counted in elements, degrees can be compared.",
            units_alone,
            about=("sent",),
        ),
    ),
)
