"""Chapter 05, layers that are whole only while they compute: exercises 05.1 and 05.2."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lib.check.exercise import Data, Exercise, Mistake, but, random
from lib.check.listen import listen
from lib.memory import MemoryTracker
from lib.mesh import Group

AS_NEEDED, MORE = "what is needed", "more than that"


def shards_of(whole: Tensor, n: int) -> list[Tensor]:
    """n shards of a flat tensor, with zeros at its end."""
    return list(pad(whole, (0, -len(whole) % n)).chunk(n))


# ---- 05.1 forward ---------------------------------------------------------------------------------------------------

_SIZES = ((17, 11), *((13, 17), (17, 13)) * 5, (7, 17))  # (out, in); there is padding on 3 ranks and on 4
ROWS = 2
FEW, MANY = "one or two layers at a time", "more than six layers at once"


def _layers_inputs(generator: torch.Generator, n: int) -> list[Data]:
    layers = [shards_of(random(generator, out * into + out), n) for out, into in _SIZES]
    return [
        {"x": random(generator, ROWS, _SIZES[0][1]), "shards": [shards[r] for shards in layers]} for r in range(n)
    ]


def _forward(answer: Callable, group: Group, given: Data) -> Data:
    x, shards = given["x"].clone(), [shard.clone() for shard in given["shards"]]
    largest = max(out * into + out for out, into in _SIZES) * x.element_size()
    heard, memory = listen(), MemoryTracker()
    memory.count_as("parameter", *shards)
    with memory:
        y = answer(x, shards, list(_SIZES), group)
    most = sum((group.size - 1) * shard.nbytes for shard in shards)
    return {
        "y": y,
        "layers in memory": MANY if memory.peak_by_kind["activation"] > 6.5 * largest else FEW,
        "what was sent": MORE if heard.sent_bytes(group.size) > 1.1 * most else AS_NEEDED,
    }


def _layer(whole: Tensor, out: int, into: int) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out]."""
    return whole[: out * into].view(out, into), whole[out * into :][:out]


def _outputs(
    layer: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] = _layer,
    between: Callable[[Tensor], Tensor] = torch.relu,
    after: Callable[[Tensor], Tensor] = lambda y: y,
) -> Callable:
    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found = []
        for g in given:
            y = g["x"]
            for i, (out, into) in enumerate(_SIZES):
                weight, bias = layer(torch.cat([other["shards"][i] for other in given]), out, into)
                y = y @ weight.T + bias
                y = between(y) if i < len(_SIZES) - 1 else after(y)
            found.append({"y": y})
        return found

    return answers


def _forward_reference(given: list[Data]) -> list[Data]:
    return [y | {"layers in memory": FEW, "what was sent": AS_NEEDED} for y in _outputs()(given)]


FORWARD = Exercise(
    id="05.1",
    title="forward",
    points=2,
    body=_forward,
    inputs=_layers_inputs,
    reference=_forward_reference,
    timeout_s=20,
    mistakes=(
        Mistake(
            "The output is right, but more than six layers are in memory at once: that is the model which does not "
            "fit. Gather a layer just before it computes, and keep no reference to it afterwards.",
            lambda given, want: [{"y": w["y"], "layers in memory": MANY} for w in want],
        ),
        Mistake(
            "You took the bias from the end of the gathered tensor, and there is padding. It begins where the weight "
            "ends, at out · in, and has `out` numbers.",
            _outputs(lambda whole, out, into: (_layer(whole, out, into)[0], whole[-out:])),
        ),
        Mistake(
            "You read the bias first. A layer lies in memory as its weight, then its bias, then the padding.",
            _outputs(lambda whole, out, into: (whole[out:][: out * into].view(out, into), whole[:out])),
        ),
        Mistake(
            "You read the weight as [in, out]. It lies there row by row as [out, in]: view it so, then transpose.",
            _outputs(lambda whole, out, into: (whole[: out * into].view(into, out).T, _layer(whole, out, into)[1])),
        ),
        Mistake(
            "The biases are missing: y = x·Wᵀ + b.",
            _outputs(lambda whole, out, into: (_layer(whole, out, into)[0], torch.zeros(()))),
        ),
        Mistake(
            "There is a relu behind the last layer. It belongs between layers.",
            _outputs(after=torch.relu),
        ),
        Mistake("There is no relu between the layers.", _outputs(between=lambda y: y)),
        Mistake(
            "The output is right, but you send more than each layer once: (n-1)/n of it is enough for all it holds.",
            lambda given, want: [{"y": w["y"], "layers in memory": FEW, "what was sent": MORE} for w in want],
        ),
    ),
)

# ---- 05.2 ShardedLinear ---------------------------------------------------------------------------------------------

_OUT, _IN = 31, 29
_KEPT_BYTES = 8 * (_OUT * _IN // 2 + 3 * ROWS * (_OUT + _IN))  # half a weight, and more than input and output
SHARDS, WHOLE = "the shard, and the input", "the whole weight"


def _linear_inputs(generator: torch.Generator, n: int) -> list[Data]:
    shards = shards_of(random(generator, _OUT * _IN), n)
    return [
        {"x": random(generator, ROWS, _IN), "shard": shard, "gradient": random(generator, ROWS, _OUT)}
        for shard in shards
    ]


def _linear(answer: Any, group: Group, given: Data) -> Data:
    x, shard = (given[name].clone().requires_grad_() for name in ("x", "shard"))
    heard, memory = listen(), MemoryTracker()
    memory.count_as("parameter", shard)
    with memory:
        y = answer.apply(x, shard, (_OUT, _IN), group)
        keeps_whole = not _falls(lambda: memory.live["activation"], _KEPT_BYTES)
        result = y.detach().clone()
        y.backward(given["gradient"])
    whole_bytes = _OUT * _IN * x.element_size()
    halves = heard.sent_bytes(group.size) / ((group.size - 1) / group.size * whole_bytes)
    return {
        "y": result,
        "gradient of x": x.grad,
        "gradient of the shard": shard.grad,
        "kept for backward": WHOLE if keeps_whole else SHARDS,
        "what was sent": MORE if halves > 3.3 else AS_NEEDED,
    }


def _falls(live_bytes: Callable[[], int], most: int) -> bool:
    """Whether it is at most that, at once or soon: gloo's thread lets go of a tensor a moment after wait()."""
    until_s = time.monotonic() + 0.5
    while live_bytes() > most and time.monotonic() < until_s:
        time.sleep(0.005)
    return live_bytes() <= most


def _weight(given: list[Data]) -> Tensor:
    return torch.cat([g["shard"] for g in given])[: _OUT * _IN].view(_OUT, _IN)


def _linear_reference(given: list[Data]) -> list[Data]:
    weight, shards = _weight(given), _weight_gradients(given)
    return [
        {
            "y": g["x"] @ weight.T,
            "gradient of x": g["gradient"] @ weight,
            "gradient of the shard": shard,
            "kept for backward": SHARDS,
            "what was sent": AS_NEEDED,
        }
        for g, shard in zip(given, shards, strict=True)
    ]


def _weight_gradients(given: list[Data], transposed: bool = False) -> list[Tensor]:
    """Each rank's shard of the mean of the ranks' gradients."""
    mean = sum(g["gradient"].T @ g["x"] for g in given) / len(given)
    return shards_of((mean.T if transposed else mean).flatten(), len(given))


def _gradients(**of: Callable[[list[Data], list[Data]], list]) -> Callable:
    """Like the right answer, but for the gradients of these: x, shard."""
    names = {"x": "gradient of x", "shard": "gradient of the shard"}

    def answers(given: list[Data], want: list[Data]) -> list[Data]:
        changed = {names[which]: make(given, want) for which, make in of.items()}
        found = []
        for r, w in enumerate(want):
            right = {name: w[name] for name in ("y", *names.values())}
            found.append(right | {name: values[r] for name, values in changed.items()})
        return found

    return answers


def _own_slices(given: list[Data], want: list[Data]) -> list[Tensor]:
    return [shards_of((g["gradient"].T @ g["x"]).flatten(), len(given))[r] for r, g in enumerate(given)]


LINEAR = Exercise(
    id="05.2",
    title="ShardedLinear",
    points=3,
    body=_linear,
    inputs=_linear_inputs,
    reference=_linear_reference,
    timeout_s=20,
    mistakes=(
        Mistake(
            "The gradients are right, but from forward to backward the whole weight stays in memory: you gather in "
            "forward only, and save what came. Save x and the shard, and gather again in backward.",
            but(**{"kept for backward": WHOLE}),
        ),
        Mistake(
            "The gradients are right, but you send more than two gathers and a reduce-scatter: an all-reduce gives "
            "every rank the gradient of all shards. Each needs its own.",
            but(**{"what was sent": MORE}),
        ),
        Mistake(
            "The gradient of the shard is as many times too large as there are ranks: the ranks' sum, where the mean "
            'was asked for. Use op="mean".',
            _gradients(shard=lambda given, want: [len(given) * w["gradient of the shard"] for w in want]),
        ),
        Mistake(
            "The gradient of the shard is of this rank's rows alone: you cut your own gradient and sent nothing. The "
            "other ranks' rows went through the same weight: reduce-scatter it.",
            _gradients(shard=_own_slices),
        ),
        Mistake(
            "Backward returns no gradient of x, so the layers before this one get none. It is the gradient of y times "
            "the weight.",
            _gradients(x=lambda given, want: [None] * len(given)),
        ),
        Mistake(
            "You averaged the gradient of x over the ranks. Each rank has rows of its own: nothing of x is shared, "
            "only the weight is.",
            _gradients(x=lambda given, want: [torch.stack([w["gradient of x"] for w in want]).mean(0)] * len(given)),
        ),
        Mistake(
            "The gradient of the weight is transposed: it must lie as the weight does, [out, in]. That is the "
            "gradient of y, transposed, times x.",
            _gradients(shard=lambda given, want: _weight_gradients(given, transposed=True)),
        ),
    ),
)

EXERCISES = (FORWARD, LINEAR)
