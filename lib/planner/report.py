"""One report of a run before it starts: what each rank holds, sends and waits for, and what goes into the numbers.

A `Plan` gives exact bytes of a model of this library; a `Training` and a layout give formulas, with seconds, for any
model on a cluster. A report prints both alike, about 100 characters wide.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby

from lib.cost.bubble import bubble
from lib.cost.hardware import device_text
from lib.cost.models import NOT_MODELLED, model_text
from lib.cost.sizes import ModelShape
from lib.layout import Layout
from lib.planner.context import way_of
from lib.planner.evidence import evidence_of
from lib.planner.fp8 import in_8_bit_text
from lib.planner.margin import HEADROOM, ran_text, verdict_text, without_seconds
from lib.planner.memory import bytes_of_rank, parameters_of_rank, share_of_rank
from lib.planner.seconds import OPTIMIZER_BYTES, Seconds, step_and_waits, step_s
from lib.planner.stacks import calibration_text
from lib.planner.training import Layout4D, Training

WIDTH, MOST_GANTT_ROWS = 100, 8
MOST_PLACES = 16  # of a pipeline that are listed
SENT = {  # along each axis of a training
    "tp": "activations",
    "cp": "keys and values",
    "dp": "gradients, parameters",
    "pp": "activations, their gradients",
}
WAYS = {  # of attention over cp
    "gather": "keys and values gathered",
    "ring": "keys and values passed around a ring",
    "ulysses": "tokens exchanged for heads",
}
KINDS = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer", "activations": "activation"}


@dataclass(frozen=True)
class Report:
    """What is known of a run before it starts; `dataclasses.asdict` makes plain data of it.

    A place in the pipeline has `ranks` and `layers` in words; `parameters`, and microbatches `in_flight`, of a rank;
    kind → bytes `held`, each at its own peak, and at that of their `total`. What a rank sends has `what`; `calls`,
    where counted, and `bytes`, of the place that sends least and of the place that sends most; `where`; of a training
    also `seconds` in a step, those that computation hides, and those of latency.
    """

    axes: list[str]  # the layout in words
    places: list[dict]
    sends: list[dict] | None  # in a step; None: not counted
    waits: list[str]  # the bubble in words, and its picture
    notes: list[str]  # whether the bytes fit, or what they leave out
    seconds: dict[str, float] = field(default_factory=dict)  # of a step, by kind; an exact plan has none
    answers: dict[str, float] = field(default_factory=dict)  # tokens per second, utilisation, days, money
    assumes: dict[str, str] = field(default_factory=dict)  # subject → all numbers that went in, in words
    errors: dict[str, dict] = field(default_factory=dict)  # of `seconds` and `memory` on published runs: `Evidence`

    def __str__(self) -> str:
        assumes = ["assumes"] * bool(self.assumes) + [f"{name}: {said}" for name, said in self.assumes.items()]
        sent = [] if self.sends is None else [self._sent()]
        parts = self.axes, self._held(), sent, self.waits, self._answered(), assumes
        return "\n\n".join(wrapped(part) for part in parts if part)

    def _held(self) -> list[str]:
        """A row for each place in the pipeline; and why the highest peak is higher than the lowest."""
        most, least = (of(self.places, key=lambda place: place["held"]["total"]) for of in (max, min))
        is_large = most["held"]["total"] >= 1e9
        unit, scale, form = ("GB", 1e9, ".2f") if is_large else ("MB", 1e6, ".3f")
        kinds = [kind for kind in most["held"] if any(place["held"][kind] for place in self.places)]
        rows = [["ranks", "layers", "Ψ", "m kept", *kinds[:-1], f"total {unit}"]]
        for place in self.places:
            sizes = [format(place["held"][kind] / scale, form) for kind in kinds]
            psi = f"{place['parameters'] / 1e9:.3f}e9" if is_large else f"{place['parameters']:,}"
            rows.append([place["ranks"], place["layers"], psi, f"{place['in_flight']:.3g}", *sizes])
        if len(self.places) > MOST_PLACES:
            rows[MOST_PLACES // 2 : -MOST_PLACES // 2] = [["…", *[""] * (len(rows[0]) - 1)]]
        more = {kind: (most["held"][kind] - least["held"][kind]) / scale for kind in kinds[:-1]}
        why = max(more, key=more.get)
        flights = f", {most['in_flight']:.3g} microbatches in flight instead of {least['in_flight']:.3g}"
        than = f"than on ranks {least['ranks']}{flights if why == 'activations' else ''}"
        highest = f"highest on ranks {most['ranks']}: {more[why]:{form}} {unit} more {why} {than}"
        return [table(rows), *([highest] if more[why] > 0 else []), *self.notes]

    def _sent(self) -> str:
        """A row for each kind of message; a range goes from the place that sends least to the place that sends most."""
        if not self.sends:
            return "nothing is sent"
        is_exact = self.sends[0]["calls"] is not None
        unit, scale, form = ("MB", 1e6, ".3f") if is_exact else ("GB", 1e9, ".2f")
        timed = ["GB/s", "seconds", "latency", "hidden", "waited"]
        rows = [["sent by a rank in a step", *["calls"] * is_exact, unit, *([] if is_exact else timed), "nodes"]]
        for sent in self.sends:
            calls = [_range(sent["calls"], "d")] if is_exact else []
            took = [] if is_exact else _times(sent)
            rows.append(
                [sent["what"], *calls, _range([n / scale for n in sent["bytes"]], form), *took, sent["where"]]
            )
        return table(rows)

    def _answered(self) -> list[str]:
        """Seconds by kind; tokens per second; utilisation, with the attention that it counts; days and money."""
        of, lines = self.answers, []
        if of:
            kinds = [f"{kind} {s:.2f} ({s / of['step_s']:.0%})" for kind, s in self.seconds.items() if s]
            lines.append(f"{of['step_s']:.2f} s per step: {', '.join(kinds)}")
            lines.append(f"{of['step_s']:.2f} s{self.errors['seconds']['said']}")
            lines.append(f"{of['tokens_per_s']:,.0f} tokens/s, {of['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU")
            used = "MFU {:.1%}, HFU {:.1%}, counting "
            lines.append(used.format(of["mfu"], of["hfu"]) + "the full s x s matrix of attention")
            if of["mfu"] > 1.1 * of["mfu_causal"]:
                half = "its causal half, all that a fused kernel computes"
                lines.append(used.format(of["mfu_causal"], of["hfu_causal"]) + half)
        if "days" in of:
            tokens = f"{of['tokens'] / 1e9:,.6g} billion tokens"
            lines.append(f"{tokens}: {of['days']:,.1f} days, {of['gpu_hours']:,.0f} GPU hours")
        if "money" in of:
            lines[-1] += f", {of['money']:,.0f} at {of['price_per_gpu_hour']:g} per GPU hour"
        return lines


def _times(sent: Mapping) -> list[str]:
    """Speed, and seconds: in all, of latency, those that computation hides, and those that ranks wait."""
    whole, late, hidden = sent["seconds"], sent["latency_s"], sent["hidden_s"]
    speed = sent["bytes"][0] / (whole - late) / 1e9
    return [f"{speed:.1f}", *(f"{s:.2f}" for s in (whole, late, hidden, whole - hidden))]


def _range(numbers: Sequence[float], form: str) -> str:
    least, most = (format(number, form) for number in numbers)
    return most if least == most else f"{least} to {most}"


def wrapped(lines: Iterable[str], width: int = WIDTH) -> str:
    """Lines of text in lines of at most `width`; a table stays as it is."""
    how = {"width": width, "subsequent_indent": "  ", "break_on_hyphens": False}
    return "\n".join(line if "\n" in line else textwrap.fill(line, **how) for line in lines)


def table(rows: list[list[str]]) -> str:
    """Rows as columns side by side; words to the left, numbers to the right."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        place = str.ljust if i == 0 or not column[-1][:1].isdigit() else str.rjust
        columns.append([place(cell, max(map(len, column))) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3, 8-11`; of more than two runs the first, and how many ranks in all."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(words) if len(words) <= 2 else f"{words[0]}, … ({len(ranks)})"


def axes_in_words(
    shape: ModelShape, batch: int, sizes: dict, schedule: str, m: int, layout: Layout | Layout4D
) -> list[str]:
    """The layout in words: the dimension that each axis splits."""
    order = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
    dp, tp, own = sizes["dp"], sizes["tp"], shape.context // sizes.get("cp", 1)
    between = own // tp if layout.sequence_parallel else own
    each, of = batch // dp, f"{shape.vocab_size // tp} of {shape.vocab_size} vocabulary entries, {between} of {own}"
    return [
        f"{math.prod(sizes.values())} ranks = {order} (neighbours on the last axis have consecutive numbers)",
        f"dp {dp}: {each} of {batch} sequences each, in {m} microbatches of {each // m}; zero {layout.zero}",
        f"pp {layout.pp}: {layout.pp * layout.stages_per_rank} stages, schedule {schedule}",
        f"tp {tp}: {shape.num_heads // tp} of {shape.num_heads} heads, {of} tokens between the layers",
    ]


# ---- of a training --------------------------------------------------------------------------------------------------


def report_of_layout(
    training: Training, layout: Layout4D, tokens: float = 0, price: float = 0, headroom: float = HEADROOM
) -> Report:
    """Bytes and seconds of a run on a cluster, from formulas; days for `tokens`, money at a `price` per GPU hour."""
    places = [_place(training, layout, place) for place in range(layout.pp)]
    need = max(place["held"]["total"] for place in places)
    notes = [verdict_text(training, layout, headroom), ran_text(need, training.room_bytes)]
    errors = {quantity: evidence.plain() for quantity, evidence in evidence_of(training).items()}
    notes.append(f"{need / 1e9:.1f} GB{errors['memory']['said']}")
    words = _described(training, layout)
    if training.no_seconds:
        notes += without_seconds(training, layout)
        return Report(words, places, None, [], notes, assumes=_inputs(training), errors=errors)
    if training.optimizer != "adam":
        notes.append(f"the seconds of {training.optimizer} are taken to be those of Adam")
    seconds = step_s(training, layout)
    answers = _answers(training, layout, seconds.total)
    if tokens:
        answers |= _of_the_run(tokens, price, layout.gpus, answers)
    sends = _sends(training, layout)
    waits = _waits(training, layout, seconds)
    return Report(words, places, sends, waits, notes, seconds._asdict(), answers, _inputs(training), errors)


def _described(training: Training, layout: Layout4D) -> list[str]:
    """The axes, and each option that is not the usual one, in a line."""
    model, batch, x = training.model, training.global_batch, layout
    sizes = {"pp": x.pp, "dp": x.dp, "cp": x.cp, "tp": x.tp}
    m, is_interleaved = max(1, int(x.microbatches(batch))), x.stages_per_rank > 1 and x.schedule == "1f1b"
    lines = axes_in_words(model, batch, sizes, "interleaved " * is_interleaved + x.schedule.upper(), m, layout)
    if x.cp > 1:
        how = WAYS[way_of(training, x)]
        lines.append(f"cp {x.cp}: {model.context // x.cp} of {model.context} tokens each, {how}")
    if x.replicas > 1:
        lines.append(f"replicas {x.replicas}: ZeRO shards over {x.shards} ranks")
    if x.recompute != "none":
        lines.append(f"recompute {x.recompute}" + f", in one block of {x.every}" * (x.every > 1))
    if training.stack.fp8_speedup != 1:
        lines.append(in_8_bit_text(training.stack))
    if x.loss_chunks > 1:
        lines.append(f"the loss in {x.loss_chunks} pieces of the sequence")
    return lines


def _waits(training: Training, layout: Layout4D, seconds: Seconds) -> list[str]:
    """The bubble, beside that of equal stages, for which there is a formula with 1F1B."""
    if layout.pp == 1:
        return []
    m = max(1, int(layout.microbatches(training.global_batch)))
    equal = bubble(layout.pp, m, layout.stages_per_rank)
    told = f" (were all stages equal, {equal:.1%})" if layout.schedule == "1f1b" else ""
    return [f"bubble: {seconds.bubble / seconds.total:.1%} of the step{told}"]


def _answers(training: Training, layout: Layout4D, step: float) -> dict[str, float]:
    """What people ask of a step that takes so many seconds."""
    of_step = training.global_batch * training.model.context
    answers = {"step_s": step, "tokens_per_s": of_step / step, "tokens_per_s_per_gpu": of_step / step / layout.gpus}
    for name, recompute in (("mfu", "none"), ("hfu", layout.recompute)):
        answers[name] = training.utilisation(step, recompute, layout.every, False)
        answers[f"{name}_causal"] = training.utilisation(step, recompute, layout.every, True)
    return answers


def _of_the_run(tokens: float, price: float, gpus: int, of_step: Mapping[str, float]) -> dict[str, float]:
    """Days, GPU hours, and money if there is a price, for so many tokens."""
    hours = tokens / of_step["tokens_per_s"] / 3600
    run = {"tokens": tokens, "days": hours / 24, "gpu_hours": hours * gpus}
    if price:
        run |= {"price_per_gpu_hour": price, "money": price * run["gpu_hours"]}
    return run


def _inputs(training: Training) -> dict[str, str]:
    """All that went into the numbers, in words."""
    cluster, constants = training.cluster, asdict(training.stack)
    recipe = "{weight_bytes} + {gradient_bytes} + {master_bytes} + {state_bytes:g}".format(**constants.pop("recipe"))
    numbers = [f"{name} {value}" for name, value in constants.items()]
    numbers.append(f"matmul_share calibrated on {calibration_text(training.stack.matmul_share)}")
    numbers.append(f"bytes per parameter kept {recipe} and moved {OPTIMIZER_BYTES}")
    trained = [training.optimizer, *[f"offloaded {training.offload}"] * bool(training.offload)]
    trained += [f"{training.adapters}, in float32"] * bool(training.adapters)
    return {
        "model": model_text(training.model),
        "GPU": device_text(cluster.device, cluster.per_node),
        "stack": ", ".join(numbers),
        "trained": ", ".join(trained),
        "not modelled": ", ".join(NOT_MODELLED),
    }


def _place(training: Training, layout: Layout4D, place: int) -> dict:
    n, held = layout.gpus // layout.pp, bytes_of_rank(training, layout, place)
    embeds, heads, blocks, in_flight = share_of_rank(training, layout, place)
    return {
        "ranks": ranks_text(range(place * n, place * n + n)),
        "layers": "embed " * embeds + f"{blocks:g}" + " head" * heads,
        "parameters": int(sum(parameters_of_rank(training, layout, place))),
        "in_flight": in_flight,
        "held": held._asdict() | {"total": held.total},
    }


def _sends(training: Training, layout: Layout4D) -> list[dict]:
    """What each axis sends, where, and how long; how much of that hides, and how much is latency."""
    waits, sends = step_and_waits(training, layout)[1], []
    swaps = {"cp": "queries, keys, values, results"} if way_of(training, layout) == "ulysses" else {}
    for axis, what in (SENT | swaps).items():
        wait, messages = waits[axis], waits[axis].messages
        if messages.bytes:
            where = training.cluster.where(layout.group(axis)[1])
            times = {"seconds": messages.seconds, "latency_s": messages.latency_s, "hidden_s": wait.hidden_s}
            each = {"calls": None, "bytes": (messages.bytes, messages.bytes), "where": where}
            sends.append({"what": f"{axis}: {what}", **each, **times})
    return sends
