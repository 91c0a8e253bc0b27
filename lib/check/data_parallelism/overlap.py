"""Chapter 03, what is sent when: exercises 03.3 and 03.4."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, everywhere, means_of, random, scaled
from lib.check.listen import listen
from lib.mesh import Group

# ---- 03.3 overlapped ------------------------------------------------------------------------------------------------

_STREAM = ((4,), (2, 3), (3,), (5, 4), (4, 2), (2,), (3, 3), (2,))
_ROOM = 12  # numbers in a bucket


def _stream_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"gradients": [random(generator, *shape) for shape in _STREAM]} for _ in range(n)]


def _buckets(overrun: bool = False) -> list[tuple[int, int]]:
    """First gradient of each bucket, and the one after its last; with `overrun`, each takes one that does not fit."""
    buckets, start, held = [], 0, 0
    for i, shape in enumerate(_STREAM):
        size = torch.Size(shape).numel()
        if i > start and held + size > _ROOM and not overrun:
            buckets.append((start, i))
            start, held = i, 0
        held += size
        if held >= _ROOM:
            buckets.append((start, i + 1))
            start, held = i + 1, 0
    return buckets + [(start, len(_STREAM))] * (start < len(_STREAM))


def _overlapped(answer: Callable, group: Group, given: Data) -> Data:
    made = 0  # gradients that backward has made so far
    starts: list[int] = []  # at each start of a communication, how many were made
    waits: list[int] = []

    def backward() -> Iterator[Tensor]:
        nonlocal made
        for g in given["gradients"]:
            made += 1
            yield g.clone()
        made += 1  # the end

    listen(lambda: starts.append(made), lambda: waits.append(made))
    averages = answer(backward(), _ROOM * 8, group)
    averages = None if averages is None else list(averages)
    return {"averages": averages, "what was sent when": _describe(starts, waits)}


ONE_EACH = "one message for each gradient"
AT_THE_END = "all messages after the last gradient"
WAITS = "a wait before the last gradient"
OVERRUN = "buckets that hold more than they may"
LATE = "buckets that leave later than they could"
RIGHT = "each bucket as it fills"


def _describe(starts: list[int], waits: list[int]) -> str:
    end = len(_STREAM) + 1
    if any(made < end for made in waits):
        return WAITS
    if len(starts) == len(_STREAM):
        return ONE_EACH
    if all(made == end for made in starts):
        return AT_THE_END
    for buckets, name in ((_buckets(), RIGHT), (_buckets(overrun=True), OVERRUN)):
        # A bucket leaves with its last gradient, or when the next one turns out not to fit.
        if _all_pairs(lambda made, bucket: bucket[1] <= made <= bucket[1] + 1, starts, buckets):
            return name
    if _all_pairs(lambda made, bucket: made >= bucket[1], starts, _buckets()):
        return LATE
    return f"{len(starts)} messages where {len(_buckets())} do"


def _all_pairs(holds: Callable, some: list, others: list) -> bool:
    return len(some) == len(others) and all(map(holds, some, others))


def _stream_reference(given: list[Data]) -> list[Data]:
    return everywhere({"averages": means_of("gradients", given), "what was sent when": RIGHT}, given)


def _sent(how: str) -> Callable:
    return lambda given, want: [{"averages": w["averages"], "what was sent when": how} for w in want]


def _without_last(fill: Callable[[Data], list[Tensor]]) -> Callable:
    start = _buckets()[-1][0]
    return lambda given, want: [
        {"averages": w["averages"][:start] + fill(g)} for g, w in zip(given, want, strict=True)
    ]


OVERLAPPED = Exercise(
    id="03.3",
    title="overlapped",
    points=3,
    body=_overlapped,
    inputs=_stream_inputs,
    reference=_stream_reference,
    ranks=(3, 4, 5),
    mistakes=(
        Mistake(
            "The averages are right, and no byte travels during backward: you start every all-reduce after the last "
            "gradient. Do not collect the iterator into a list; start a bucket while you loop.",
            _sent(AT_THE_END),
        ),
        Mistake(
            "The averages are right, but you wait for an all-reduce before the last gradient is there, and backward "
            "stands still meanwhile. Keep what all_reduce_start returns, and wait after the loop.",
            _sent(WAITS),
        ),
        Mistake(
            "The averages are right, but each gradient travels alone and pays a latency of its own. Put several into "
            "one flat tensor (torch.cat of the flattened ones).",
            _sent(ONE_EACH),
        ),
        Mistake(
            "The averages are right, but a bucket takes a gradient that no longer fits. Look at the size of the next "
            "one before you add it: if it does not fit, send the bucket first.",
            _sent(OVERRUN),
        ),
        Mistake(
            "The averages are right, but a full bucket waits while you take more gradients. Start its all-reduce at "
            "once, before the loop asks for the next one.",
            _sent(LATE),
        ),
        Mistake(
            "The last bucket never left: the gradients that wait in it when the iterator ends are missing. Send what "
            "is left after the loop.",
            _without_last(lambda given: []),
        ),
        Mistake(
            "The last bucket never left: its gradients are still this rank's own. Send what is left after the loop.",
            _without_last(lambda given: given["gradients"][_buckets()[-1][0] :]),
        ),
        Mistake(
            'You summed and did not divide by the number of ranks. Use op="mean".',
            lambda given, want: [{"averages": [a * len(given) for a in w["averages"]]} for w in want],
        ),
        Mistake(
            "The averages are right but in another order than the gradients came in.",
            lambda given, want: [{"averages": w["averages"][::-1]} for w in want],
        ),
    ),
)

# ---- 03.4 accumulate ------------------------------------------------------------------------------------------------

_K = 5  # not a number of ranks, as the mistakes are told apart by their factor; more than parameters, see below
ONCE, EACH_TIME = "at most one message for each parameter", "more than one message for each parameter"


def _accumulate_inputs(generator: torch.Generator, n: int) -> list[Data]:
    weights = [random(generator, 5, 4), random(generator, 5), random(generator, 2, 5), random(generator, 2)]
    return [
        {
            "weights": weights,
            "microbatches": [(random(generator, 4, 4), random(generator, 4, 2)) for _ in range(_K)],
        }
        for _ in range(n)
    ]


def _model(weights: list[Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(DTYPE)
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    return model


def _accumulate(answer: Callable, group: Group, given: Data) -> Data:
    model, messages = _model(given["weights"]), []
    listen(lambda: messages.append(1))
    answer(model, given["microbatches"], mse_loss, group)
    params = list(model.parameters())
    # Even one flat message for each of the microbatches is more than one for each of the parameters.
    return {
        "gradients": [p.grad for p in params],
        "how often was sent": ONCE if len(messages) <= len(params) else EACH_TIME,
    }


def _accumulate_reference(given: list[Data]) -> list[Data]:
    model = _model(given[0]["weights"])
    for rank in given:
        for x, y in rank["microbatches"]:
            (mse_loss(model(x), y) / (_K * len(given))).backward()
    return everywhere({"gradients": [p.grad for p in model.parameters()], "how often was sent": ONCE}, given)


ACCUMULATE = Exercise(
    id="03.4",
    title="accumulate",
    points=2,
    body=_accumulate,
    inputs=_accumulate_inputs,
    reference=_accumulate_reference,
    mistakes=(
        Mistake(
            f"Exactly {_K} times too large, and there are {_K} microbatches: backward adds up, and a sum of mean "
            "losses is not a mean. Divide each loss by their number.",
            scaled(lambda n: _K),
        ),
        Mistake(
            "Exactly as many times too large as there are ranks: you summed over them and did not divide.",
            scaled(lambda n: n),
        ),
        Mistake(
            f"Exactly {_K} times too small: you divided by the number of microbatches twice.",
            scaled(lambda n: 1 / _K),
        ),
        Mistake(
            "Too large by ranks times microbatches: nothing was divided.",
            scaled(lambda n: _K * n),
        ),
        Mistake(
            "The gradients are right, and you paid for them several times: you communicate after every microbatch. "
            "The weights do not change in between, so once, after the last, is enough.",
            lambda given, want: [{"gradients": w["gradients"], "how often was sent": EACH_TIME} for w in want],
        ),
    ),
)

EXERCISES = (OVERLAPPED, ACCUMULATE)
