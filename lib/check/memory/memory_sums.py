"""Chapter 01, bytes and days from a model's sizes: exercises 01.1, 01.2, 01.4 and 01.5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, each_call, formula, whole
from lib.cost import activation_bytes, state_bytes, train_s
from lib.cost.sizes import ModelShape, Recipe
from lib.mesh import Group

# ---- 01.1 state_bytes -----------------------------------------------------------------------------------------------

_STATE = {"SGD": 0, "momentum": 4, "Adam": 8}
_KINDS = ("parameter", "gradient", "optimizer")


def _recipes_inputs(generator: torch.Generator, n: int) -> list[Data]:
    pairs = [(precision, optimizer) for precision in ("float32", "mixed") for optimizer in _STATE]
    return [{"cases": [(whole(generator, 10**6, 10**9), *pair) for pair in pairs]}]


def _by_kind(name: str, case: Sequence, result: Any) -> Data:
    """Entries for each kind, so that a FAIL says which one is wrong."""
    kinds = result if isinstance(result, dict) else {}
    return {f'{call(name, case)}["{kind}"]': kinds.get(kind) for kind in _KINDS}


def _state_bytes(answer: Callable, group: Group, given: Data) -> Data:
    return {k: v for case in given["cases"] for k, v in _by_kind("state_bytes", case, answer(*case)).items()}


def _recipe(precision: str, optimizer: str) -> Recipe:
    return Recipe(*((4, 4, 0) if precision == "float32" else (2, 2, 4)), _STATE[optimizer])


def _recipes(of: Callable[[str, str], Recipe] = _recipe, master_as: str = "optimizer") -> Callable:
    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found = {}
        for num_parameters, precision, optimizer in given[0]["cases"]:
            recipe = of(precision, optimizer)
            held = dict(zip(_KINDS, (recipe.weight_bytes, recipe.gradient_bytes, recipe.state_bytes), strict=True))
            held[master_as] += recipe.master_bytes
            total = {kind: float(n_bytes * num_parameters) for kind, n_bytes in held.items()}
            found |= _by_kind("state_bytes", (num_parameters, precision, optimizer), total)
        return [found]

    return answers


STATE = Exercise(
    id="01.1",
    title="state_bytes",
    points=2,
    body=_state_bytes,
    inputs=_recipes_inputs,
    reference=_recipes(),
    ranks=(1,),
    mistakes=(
        Mistake(
            "The master weights are missing. In mixed precision the optimizer updates a float32 copy of each "
            "parameter: 4 bytes more, whatever the optimizer.",
            _recipes(lambda p, o: Recipe(*((4, 4) if p == "float32" else (2, 2)), 0, _STATE[o])),
        ),
        Mistake(
            "You have master weights in float32 too. There the parameter itself is precise enough, and no copy is "
            "kept.",
            _recipes(lambda p, o: Recipe(*((4, 4) if p == "float32" else (2, 2)), 4, _STATE[o])),
        ),
        Mistake(
            "The sum is right. But master weights count as the optimizer's: nothing else reads them, and ZeRO-1 "
            "shards them with its state.",
            _recipes(master_as="parameter"),
        ),
        Mistake(
            "Adam keeps two averages for each parameter, of the gradient and of its square. You have one.",
            _recipes(
                lambda p, o: Recipe(*((4, 4, 0) if p == "float32" else (2, 2, 4)), {"Adam": 4}.get(o, _STATE[o]))
            ),
        ),
        Mistake(
            "You keep the optimizer's averages in 16 bits. In mixed precision they stay in float32, 4 bytes each.",
            _recipes(
                lambda p, o: Recipe(
                    *((4, 4, 0) if p == "float32" else (2, 2, 4)), _STATE[o] // (1 + (p != "float32"))
                )
            ),
        ),
        Mistake(
            "You keep gradients in float32. Some frameworks do, which makes 18 bytes with Adam; here they have the "
            "parameter's 2 bytes.",
            _recipes(lambda p, o: Recipe(*((4, 4, 0) if p == "float32" else (2, 4, 4)), _STATE[o])),
        ),
    ),
)

# ---- 01.2 lowest_stage ----------------------------------------------------------------------------------------------

_MIXED = Recipe(2, 2, 4, 8)


def _needs(num_parameters: int, ranks: int, recipe: Recipe = _MIXED) -> list[float]:
    """Bytes a rank at ZeRO 0, 1, 2, 3."""
    return [sum(state_bytes(num_parameters, recipe, zero=zero, dp=ranks).values()) for zero in range(4)]


def _stages_inputs(generator: torch.Generator, n: int) -> list[Data]:
    ranks = 2 ** whole(generator, 3, 7)  # so that whoever divides in floating point is exact, too
    num_parameters = ranks * whole(generator, 10**6, 10**8)
    plain, one, two, three = map(int, _needs(num_parameters, ranks))
    room = [plain, int(0.9 * plain), int(1.05 * one), (one + two) // 2, two, (two + three) // 2, int(0.9 * three)]
    return [{"cases": [(num_parameters, ranks, memory_bytes) for memory_bytes in room]}]


def _first_that_fits(needs: Sequence[float], memory_bytes: float) -> int | None:
    return next((zero for zero, need in enumerate(needs) if need <= memory_bytes), None)


def _stages(needs: Callable[[int, int], list[float]], choose: Callable = _first_that_fits) -> Callable:
    return formula("lowest_stage", lambda p, n, memory_bytes: choose(needs(p, n), memory_bytes))


def _strictly(needs: Sequence[float], memory_bytes: float) -> int | None:
    return next((zero for zero, need in enumerate(needs) if need < memory_bytes), None)


def _last_that_fits(needs: Sequence[float], memory_bytes: float) -> int | None:
    return 3 if needs[3] <= memory_bytes else None


STAGE = Exercise(
    id="01.2",
    title="lowest_stage",
    points=2,
    body=each_call("lowest_stage"),
    inputs=_stages_inputs,
    reference=_stages(_needs),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You divided everything by the number of ranks at every stage. Stage 0 divides nothing, stage 1 only the "
            "12 bytes of the optimizer, stage 2 the gradients too.",
            _stages(lambda p, n: [16 * p / n] * 4),
        ),
        Mistake(
            "You count 12 bytes a parameter. With the master weights it is 16: 2 + 2 + 12.",
            _stages(partial(_needs, recipe=Recipe(2, 2, 0, 8))),
        ),
        Mistake(
            "Your stage 1 shards the gradients. It begins with the optimizer's state, which is six times as large; "
            "the gradients follow in stage 2.",
            _stages(lambda p, n: [16 * p, (14 + 2 / n) * p, *_needs(p, n)[2:]]),
        ),
        Mistake(
            "That is the highest stage that fits. A higher stage never holds more, but from 3 on it sends more: "
            "take the lowest.",
            _stages(_needs, _last_that_fits),
        ),
        Mistake(
            "Nearly: what fills the memory to the last byte fits. Compare with <=.",
            _stages(_needs, _strictly),
        ),
        Mistake(
            "Your stage 3 leaves the parameters whole: it is stage 2 again. Stage 3 shards all 16 bytes.",
            _stages(lambda p, n: [*_needs(p, n)[:3], _needs(p, n)[2]]),
        ),
    ),
)

# ---- 01.4 recomputation ---------------------------------------------------------------------------------------------

_HOW = ("none", "selective", "full")  # cheapest first


def _fits_inputs(generator: torch.Generator, n: int) -> list[Data]:
    cases = []
    for share, how in ((1.0, "none"), (0.95, "none"), (1.0, "selective"), (0.95, "selective"), (0.95, "full")):
        heads = 4 * whole(generator, 2, 9)
        case = (whole(generator, 2, 6), 128 * whole(generator, 4, 17), 64 * heads, heads, whole(generator, 8, 65))
        cases.append((*case, int(share * _kept(*case)[_HOW.index(how)])))
    return [{"cases": cases}]


def _kept(rows: int, tokens: int, width: int, heads: int, layers: int) -> list[float]:
    """Bytes of all layers for each of `_HOW`."""
    shape = ModelShape(width, layers, heads, vocab_size=1, context=tokens)
    return [layers * activation_bytes(shape, rows, how) for how in _HOW]


def _choices(of: Callable[..., list[float]], choose: Callable = _first_that_fits) -> Callable:
    def name(*case: int) -> str | None:
        place = choose(of(*case[:-1]), case[-1])
        return None if place is None else _HOW[place]

    return formula("recomputation", name)


def _least(needs: Sequence[float], memory_bytes: float) -> int | None:
    return 2 if needs[2] <= memory_bytes else None


RECOMPUTATION = Exercise(
    id="01.4",
    title="recomputation",
    points=2,
    body=each_call("recomputation"),
    inputs=_fits_inputs,
    reference=_choices(_kept),
    ranks=(1,),
    mistakes=(
        Mistake(
            "That is what one layer keeps. All of them keep theirs until backward comes: multiply by `layers`.",
            _choices(lambda b, s, h, a, L: _kept(b, s, h, a, 1)),
        ),
        Mistake(
            "You left out the matrix of attention probabilities, 5as/h. Without it there would be nothing to gain "
            'from "selective".',
            _choices(lambda b, s, h, a, L: [34 * s * b * h * L, 34 * s * b * h * L, 2 * s * b * h * L]),
        ),
        Mistake(
            "You counted one row. A microbatch of b rows keeps b times as much.",
            _choices(lambda b, s, h, a, L: _kept(1, s, h, a, L)),
        ),
        Mistake(
            "That is the choice that keeps least. Recomputing costs time: take the first that fits, in the order "
            '"none", "selective", "full".',
            _choices(_kept, _least),
        ),
        Mistake(
            'You take "full" for free. It still keeps the input of each layer, 2sbh bytes, and that may not fit.',
            _choices(lambda *sizes: [*_kept(*sizes)[:2], 0]),
        ),
    ),
)

# ---- 01.5 days ------------------------------------------------------------------------------------------------------

_DAY_S = 86_400


def _days_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case() -> tuple:
        num_parameters, tokens = whole(generator, 10**9, 10**11), whole(generator, 10**11, 10**13)
        return num_parameters, tokens, whole(generator, 3, 5000), whole(generator, 100, 2000) * 1e12, 0.41

    return [{"cases": [case() for _ in range(3)]}]


def _days(factor: Callable[[int, float], float] = lambda gpus, utilisation: 1.0) -> Callable:
    def of(num_parameters: int, tokens: int, gpus: int, peak_flops: float, utilisation: float) -> float:
        seconds = train_s(6 * num_parameters * tokens, peak_flops, utilisation, gpus)
        return seconds / _DAY_S * factor(gpus, utilisation)

    return formula("days", of)


DAYS = Exercise(
    id="01.5",
    title="days",
    points=1,
    body=each_call("days"),
    inputs=_days_inputs,
    reference=_days(),
    ranks=(1,),
    mistakes=(
        Mistake(
            "That is forward alone, 2 operations for each parameter and token. Backward takes 4 more.",
            _days(lambda gpus, utilisation: 1 / 3),
        ),
        Mistake(
            "You count 8: that is 6 and a forward that is recomputed. Utilisation (MFU) counts the 6 that the model "
            "needs.",
            _days(lambda gpus, utilisation: 8 / 6),
        ),
        Mistake(
            "That is at the full peak. A run reaches only a part of it: divide by the utilisation.",
            _days(lambda gpus, utilisation: utilisation),
        ),
        Mistake(
            "You multiplied by the utilisation. It lowers the speed, so the time grows: divide.",
            _days(lambda gpus, utilisation: utilisation**2),
        ),
        Mistake("That is one GPU. `gpus` of them share the work.", _days(lambda gpus, utilisation: gpus)),
        Mistake("That is in hours. A day has 24.", _days(lambda gpus, utilisation: 24)),
        Mistake("That is in seconds. A day has 86 400.", _days(lambda gpus, utilisation: _DAY_S)),
    ),
)

EXERCISES = (STATE, STAGE, RECOMPUTATION, DAYS)
