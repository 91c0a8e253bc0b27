"""Why no layout fits, and what would help: each way out was tried.

The problem: "it does not fit" leaves a reader with a guess, and guesses cost days. The idea: look for the smallest
change that has a layout: more GPUs, a choice that was closed, a batch that divides, shorter sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lib.cost.hardware import GPUS
from lib.layout import divisors, one_of
from lib.planner.choices import Choices, all_layouts, layout_text
from lib.planner.memory import fits, least_bytes
from lib.planner.training import Layout4D, Training

MOST_NODES = 64  # of which any number is tried; above, powers of two
CLOSED = {  # choices that may be closed, in words
    "a pipeline": {"pipeline": True},
    "context parallelism": {"context_parallel": True},
    "a loss in pieces": {"loss_chunks": (1, 8)},
}


def nothing_fits(training: Training, choices: Choices, sizes: dict[Layout4D, float]) -> str:
    """Why there is no layout, and ways out, each of them tried; `sizes` are the bytes of all layouts."""
    if sizes:
        why, ways = _too_large(training, sizes), _larger(training, choices)
    elif dps := _possible_dp(training, choices):
        why, ways = _undivided(training, dps), _other_batch(training, choices) + _near_gpus(training, choices)
    else:
        why, ways = _uncut(training), _larger(training, choices)
    ways = ways or _other_batch(training, choices) or _shorter(training, choices)
    return f"{why}; use {one_of(ways or ['a GPU with more memory'])}"


def _too_large(training: Training, sizes: dict[Layout4D, float]) -> str:
    smallest = min(sizes, key=lambda layout: sizes[layout])
    size, more = sizes[smallest] / 1e9, (sizes[smallest] - training.room_bytes) / 1e9
    needs = f"needs {size:.1f} GB on a GPU, {more:.1f} GB more than available"
    return f"nothing fits: the smallest layout ({layout_text(smallest)}) {needs}"


def _possible_dp(training: Training, choices: Choices) -> list[int]:
    """Data-parallel ranks that heads and layers leave, whatever the batch."""
    any_batch = replace(training, global_batch=training.cluster.gpus)
    return sorted({layout.dp for layout in all_layouts(any_batch, choices)})


def _undivided(training: Training, dps: list[int]) -> str:
    model, batch = training.model, training.global_batch
    shared = f"{model.num_layers} layers and {model.num_heads} heads on {training.cluster.gpus:,} GPUs"
    return (
        f"the batch is the reason: {shared} need dp {one_of(dps)}, and a batch of {batch:,} divides by none of them"
    )


def _uncut(training: Training) -> str:
    model = training.model
    return (
        f"no layout cuts {model.num_layers} layers and {model.num_heads} heads evenly over "
        f"{training.cluster.gpus:,} GPUs"
    )


def _larger(training: Training, choices: Choices) -> list[str]:
    """More GPUs, GPUs with more memory, or choices that were closed."""
    gpus = _more_gpus(training, choices)
    ways = [f"{gpus:,} GPUs"] if gpus else []
    ways += [f"GPUs of {GPUS[name].memory_bytes / 1e9:.0f} GB ({name})" for name in _larger_card(training, choices)]
    for words, changes in CLOSED.items():
        wider = replace(choices, **changes)
        if wider != choices and _first_that_fits([training], wider):
            ways.append(words)
    if not ways:
        wider = replace(choices, **{field: value for changes in CLOSED.values() for field, value in changes.items()})
        gpus = _more_gpus(training, wider)
        closed = [words for words, changes in CLOSED.items() if replace(choices, **changes) != choices]
        ways = [f"{gpus:,} GPUs, with {' and '.join(closed)}"] if gpus else []
    return ways


def _more_gpus(training: Training, choices: Choices) -> int:
    """The fewest GPUs that have a layout; 0 if none has."""
    return _first_gpus(training, choices, [n for n in _sizes(training) if n > training.cluster.gpus])


def _near_gpus(training: Training, choices: Choices) -> list[str]:
    """The next smaller and the next larger number of GPUs that has a layout for this batch."""
    fewer = [n for n in reversed(_sizes(training)) if n < training.cluster.gpus]
    found = _first_gpus(training, choices, fewer), _more_gpus(training, choices)
    return [f"{n:,} GPUs" if n > 1 else "1 GPU" for n in found if n]


def _sizes(training: Training) -> list[int]:
    """Numbers of GPUs that are tried: powers of two, and whole nodes."""
    return sorted({2**k for k in range(21)} | {training.cluster.per_node * k for k in range(1, MOST_NODES + 1)})


def _first_gpus(training: Training, choices: Choices, sizes: Iterable[int]) -> int:
    """The first of these numbers of GPUs that has a layout; 0 if none has."""
    resized = (replace(training, cluster=replace(training.cluster, gpus=n)) for n in sizes)
    first = _first_that_fits(resized, choices)
    return first.cluster.gpus if first else 0


def _larger_card(training: Training, choices: Choices) -> list[str]:
    """The GPU with the least memory among those on which it fits, as many of them; its memory alone is looked at."""
    cluster = training.cluster
    larger = [name for name in GPUS if GPUS[name].memory_bytes > cluster.device.memory_bytes]
    for name in sorted(larger, key=lambda name: GPUS[name].memory_bytes):
        device = replace(cluster.device, memory_bytes=GPUS[name].memory_bytes)
        if _first_that_fits([replace(training, cluster=replace(cluster, device=device))], choices):
            return [name]
    return []


def _other_batch(training: Training, choices: Choices) -> list[str]:
    """The batch that fits the most layouts, but not twice as large if there is a smaller one."""
    batch = training.global_batch
    batches = sorted(
        {-(-batch // n) * n for n in divisors(training.cluster.gpus)}, key=lambda n: n if n >= 2 * batch else -n
    )
    first = _first_that_fits((replace(training, global_batch=n) for n in batches), choices)
    return [f"a batch of {first.global_batch:,} sequences"] if first else []


def _shorter(training: Training, choices: Choices) -> list[str]:
    model = training.model
    lengths = (model.context >> k for k in range(1, model.context.bit_length()))
    shorter = (replace(training, model=replace(model, context=tokens)) for tokens in lengths)
    first = _first_that_fits(shorter, choices)
    return [f"sequences of {first.model.context:,} tokens"] if first else []


def _first_that_fits(trainings: Iterable[Training], choices: Choices) -> Training | None:
    """The first that has a layout, if one has."""
    for training in trainings:
        for layout in all_layouts(training, choices):
            if least_bytes(training, layout) <= training.room_bytes and fits(training, layout):
                return training
    return None
