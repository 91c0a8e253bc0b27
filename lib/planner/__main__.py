"""Layouts for a model on a cluster: `python -m lib.planner --model llama3-70b --gpus 64 --gpu h100`.

Without a layout it searches for the fastest; with `--tp`, `--pp` and so on it reports on that one, and compares it with
the fastest. `python -m book.explain` takes the same options, beside a configuration of another program.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace

from lib.cost.adapters import Adapters
from lib.cost.expert_models import EXPERT_MODELS
from lib.cost.experts import ExpertShape
from lib.cost.hardware import Device, gpu_name
from lib.cost.models import NOT_MODELLED, known, same_name
from lib.cost.sizes import LLAMA, ModelShape, recipe_of_optimizer
from lib.planner import Choices, Cluster, Layout4D, Planned, Training, memory_bytes, step_s
from lib.planner.choices import ALL_OPEN, DEFERRED, beyond, layout_text, possible_cp
from lib.planner.expert_report import plain_report, report_of_experts
from lib.planner.experts import NO_SECONDS_OF_EXPERTS, ExpertTraining
from lib.planner.fp8 import in_8_bit
from lib.planner.options import (
    ALL_SIZES,
    BEST,
    SIZES,
    STEP_TOKENS,
    option_of,
    options_given,
    planner_options,
    trained_options,
)
from lib.planner.refusals import refusal
from lib.planner.report import report_of_layout, wrapped
from lib.planner.report_search import choices_text, needs_text, others_text, sweep_text
from lib.planner.search import choices_of, recommended, recommended_by_memory
from lib.planner.sweep import sweep
from lib.planner.training import GPUS, PRESET_MODELS, stack_for


def main(argv: list[str] | None = None) -> None:
    about = "Which layout for a model and a cluster. For a config.json, or another framework: python -m book.explain."
    parser = trained_options(planner_options("python -m lib.planner", about))
    args = parser.parse_args(argv)
    try:
        print(printed_experts(args) or answered(args))
    except ValueError as error:
        parser.error(str(error))


def refuse_not_modelled(args: argparse.Namespace) -> None:
    """Refuse an option that would be ignored."""
    if left_out := options_given(args, NOT_MODELLED):
        raise ValueError(f"{next(iter(left_out))} is not modelled")


def swept(args: argparse.Namespace, notes: Sequence[str] = ()) -> str:
    """The best layout for each value of a sweep, as text or as plain data."""
    if asked := layout_given(args):
        raise ValueError(f"--sweep searches a layout for each value: leave out {' and '.join(map(option_of, asked))}")
    if ignored := options_given(args, ("best", "tokens", "price")):
        raise ValueError(f"--sweep prints a row for each value: leave out {' and '.join(map(option_of, ignored))}")
    training = training_asked(args, {})
    rows = sweep(training, args.sweep, choices_asked(args, training, None))
    if args.json:
        plain = {"sweep": args.sweep, "rows": [row.plain() for row in rows], "notes": notes}
        return json.dumps(asdict(training) | plain, indent=1)
    return "\n\n".join(filter(None, [wrapped(notes), sweep_text(args.sweep, rows)]))


def answered(args: argparse.Namespace, notes: Sequence[str] = ()) -> str:
    """The report on the options; without seconds where they are not modelled."""
    refuse_not_modelled(args)
    if args.sweep:
        return swept(args, notes)
    if args.lora or args.offload or args.optimizer == "muon":
        return printed_memory(args, notes)
    return printed(args, *candidates(args), notes=notes)


def printed_memory(args: argparse.Namespace, notes: Sequence[str] = ()) -> str:
    """The report of a training without seconds, and layouts that fit."""
    asked = layout_given(args)
    training = training_asked(args, asked)
    if args.tokens or args.price:
        raise ValueError(f"--tokens and --price need seconds, and {training.no_seconds}")
    layout = completed_layout(training, asked) if asked else None
    choices = choices_asked(args, training, layout)
    try:
        found, nothing = recommended_by_memory(training, choices, args.best or BEST), ""
    except ValueError as error:
        if not layout:
            raise
        found, nothing = [], str(error)
    report = report_of_layout(training, layout or found[0][0], headroom=args.headroom)
    if args.json:
        more = [{"layout": one._asdict(), "held": memory._asdict()} for one, memory in found]
        return json.dumps(asdict(training) | {"report": asdict(report), "layouts": more, "notes": notes}, indent=1)
    lines = [nothing or "layouts that fit, the least split first:"]
    lines += [f"{i}. {layout_text(one)}, {memory.total / 1e9:.1f} GB" for i, (one, memory) in enumerate(found, 1)]
    lines += needs_text(training, found[0][0]) if found else []
    return "\n\n".join(filter(None, [wrapped(notes), str(report), wrapped(lines)]))


def candidates(args: argparse.Namespace) -> tuple[Training, list[Planned], str]:
    """The training; the layout that is asked for, if one is, and the fastest of a search; how they differ, in words."""
    asked = layout_given(args)
    training = training_asked(args, asked)
    mine = layout_asked(training, asked) if asked else None
    choices = choices_asked(args, training, mine and mine.layout)
    try:
        fastest, choices = recommended(training, choices, args.best or BEST)
    except ValueError as error:
        if not mine:
            raise
        return training, [mine], others_text([], mine, str(error), training.room_bytes, args.headroom)
    more = choices_text(training, fastest, choices)
    behind = others_text(fastest, mine, "", training.room_bytes, args.headroom, more)
    return training, [mine or fastest[0], *fastest], behind


def layout_given(args: argparse.Namespace) -> dict:
    """The options of a layout; a way of attention alone is a choice of the search."""
    given = options_given(args, Layout4D._fields)
    return {} if given.keys() == {"attention"} else given


def choices_asked(args: argparse.Namespace, training: Training, mine: Layout4D | None) -> Choices:
    """Those of the library, opened or closed by options; all, for a layout that has a choice beyond them."""
    choices = replace(choices_of(training), headroom=args.headroom)
    if args.context_parallel is False and mine and mine.cp > 1:
        raise ValueError(
            f"--cp {mine.cp} is context parallelism, which --no-context-parallel leaves out: give one of them"
        )
    if args.context_parallel is not None:
        choices = replace(choices, context_parallel=args.context_parallel)
    way = args.attention or ""
    if way:
        if not mine and (args.context_parallel is False or possible_cp(training) == [1]):
            raise ValueError(
                f"--attention {way} is over context-parallel ranks, and {training.model.context:,} tokens are not cut "
                "here: leave it out"
            )
        choices = replace(choices, attention=way, context_parallel=True)
    if args.zero_bubble:
        choices = replace(choices, zero_bubble=True, pipeline=True, deferred=DEFERRED)
    everything = replace(ALL_OPEN, headroom=args.headroom, attention=way)
    return everything if args.all_choices or (mine and beyond(choices, mine)) else choices


def printed(
    args: argparse.Namespace,
    training: Training,
    layouts: list[Planned],
    behind: str = "",
    before: str = "",
    notes: Sequence[str] = (),
    **beside: object,
) -> str:
    """The report of the first layout, between texts and notes; with `--json` of all, `beside` further plain data."""
    asked = args.tokens or 0, args.price or 0, args.headroom
    reports = [report_of_layout(training, planned.layout, *asked) for planned in layouts]
    if args.json:
        each = zip(layouts, reports, strict=True)
        plain, *more = [{"layout": planned.layout._asdict()} | asdict(report) for planned, report in each]
        return json.dumps(asdict(training) | {"report": plain, "layouts": more, "notes": notes} | beside, indent=1)
    return "\n\n".join(filter(None, [before, wrapped(notes), str(reports[0]), behind]))


def printed_experts(args: argparse.Namespace, shape: ExpertShape | None = None, notes: Sequence[str] = ()) -> str:
    """The report of a model with experts: of `shape`, or of a preset that has this name; nothing for all others."""
    name = args.model and same_name(args.model, EXPERT_MODELS)
    if not (shape or name):
        return ""
    sizes = {one.name for one in fields(ModelShape)} - {"context"}
    if changed := options_given(args, sizes):
        option = option_of(next(iter(changed)))
        raise ValueError(f"{option} cannot be changed in a model with experts: change its config.json")
    refuse_not_modelled(args)
    if others := [name for name in ("lora", "offload", "fp8") if getattr(args, name)]:
        raise ValueError(f"{option_of(others[0])} is not modelled for a model with experts: leave it out")
    if args.context_parallel or args.zero_bubble or args.all_choices:
        raise ValueError("layouts with experts are searched over tp, pp, dp and ep only: leave out wider choices")
    if timed := [name for name in ("sweep", "tokens", "price") if getattr(args, name)]:
        raise ValueError(
            f"{option_of(timed[0])} needs seconds, and a model with experts has {NO_SECONDS_OF_EXPERTS}; leave it out"
        )
    if args.best:
        raise ValueError(
            "--best is for a search by seconds, and of a model with experts a row for each ep is printed"
        )
    shape = shape or EXPERT_MODELS[name]
    base = replace(shape.base, context=args.context or shape.base.context)
    asked = options_given(args, (*Layout4D._fields, "ep"))
    of = ExpertTraining(replace(shape, base=base), training_asked(args, asked, base))
    report = report_of_experts(of, asked, notes, args.headroom)
    return json.dumps(plain_report(report), indent=1) if args.json else str(report)


def training_asked(args: argparse.Namespace, asked: dict, model: ModelShape | None = None) -> Training:
    """The training of these options, and of `model` if it is given; the number of GPUs may follow from the layout."""
    gpus = args.gpus or math.prod(asked.get(axis, 1) for axis in ("tp", "cp", "pp", "dp")) * ("dp" in asked)
    if not gpus:
        raise ValueError("give --gpus, the number of all GPUs")
    if not model and args.ep not in (None, 1):
        raise ValueError(f"--ep {args.ep} divides experts, and this model has none: leave it out")
    model, (name, device) = model or _model(args), _device(args)
    if gpus > device.per_node and device.network_Bps is None:
        raise ValueError(f"{gpus} GPUs of {name} are on several nodes: give --network, such as 25GB per GPU")
    batch = args.batch or max(1, STEP_TOKENS // model.context)
    stack = replace(stack_for(args.stack, name), **options_given(args, ["whole_gradient_bytes"]))
    if args.fp8:
        stack = in_8_bit(stack, name)
    if args.optimizer != "adam":
        stack = replace(stack, recipe=recipe_of_optimizer(stack.recipe, args.optimizer))
    if args.base and not args.lora:
        raise ValueError(f"--base {args.base} is the precision of a frozen model: give --lora RANK, such as 16")
    adapters = Adapters(args.lora, args.base or "16bit") if args.lora else None
    kept = adapters, args.offload or "", args.optimizer
    return Training(model, Cluster(device, gpus, device.per_node), stack, batch, *kept)


def layout_asked(training: Training, asked: dict, able: frozenset[str] = frozenset()) -> Planned:
    """The layout that is asked for, with its seconds and memory."""
    layout = completed_layout(training, asked, able)
    return Planned(layout, step_s(training, layout), memory_bytes(training, layout))


def completed_layout(training: Training, asked: dict, able: frozenset[str] = frozenset()) -> Layout4D:
    """The layout that is asked for: ranks that are left out follow; `able` as in `refusal`."""
    tp, cp, pp = (asked.get(axis, 1) for axis in ("tp", "cp", "pp"))
    dp = asked.get("dp", max(1, training.cluster.gpus // (tp * cp * pp)))
    zero = 3 if "replicas" in asked else int(dp * cp > 1)
    layout = Layout4D(tp, cp, pp, dp, zero=zero, sequence_parallel=tp > 1)._replace(**asked)
    if layout.every > 1 and layout.recompute == "none":
        raise ValueError(f"--every {layout.every} recomputes one block in so many: give --recompute, such as full")
    most = training.model.num_layers
    if layout.every > most:
        raise ValueError(f"--every {layout.every} recomputes no block of {most}: choose {most} or less")
    if layout.loss_chunks > (most := training.model.context // layout.cp):
        raise ValueError(f"--loss-chunks {layout.loss_chunks} of {most} tokens on a rank: choose {most} or less")
    if why := refusal(training, layout, able):
        raise ValueError(why)
    if training.offload == "parameters" and layout.zero != 3:
        raise ValueError("--offload parameters moves shards of ZeRO-3: add --zero 3, or take --offload optimizer")
    return layout


def _device(args: argparse.Namespace) -> tuple[str, Device]:
    """A preset, perhaps with other figures, or a GPU of its own figures."""
    given = options_given(args, [field.name for field in fields(Device)])
    if args.per_node_Bps:
        if "network_Bps" in given:
            raise ValueError("--network is per GPU and --network-per-node of a whole node: give one of them")
    figures = {"peak_flops", "memory_Bps", "link_Bps"} & given.keys()
    name = gpu_name(args.gpu or ("without a name" if figures else "h100"))
    if len(figures) == 3 and "memory_bytes" in given and name not in GPUS:
        device = Device(**{"network_Bps": None} | given, matmul_flops=None, source="given")
    else:
        name = known(name, GPUS, "GPU", "give --peak, --memory, --memory-bandwidth, --link and --network")
        device = replace(GPUS[name], **given)
    if args.per_node_Bps:
        device = replace(device, network_Bps=args.per_node_Bps / device.per_node)
    return name, device


def _model(args: argparse.Namespace) -> ModelShape:
    """A preset, perhaps with changed sizes, or a model of given sizes."""
    given = options_given(args, [field.name for field in fields(ModelShape)])
    if args.model:
        name = known(
            args.model,
            PRESET_MODELS,
            "model",
            "give its sizes, such as --hidden 4096, or its config.json to python -m book.explain",
        )
        base = asdict(PRESET_MODELS[name])
    elif missing := [f"--{option}" for option, field in SIZES.items() if field not in given]:
        raise ValueError(f"give --model, or all its numbers; missing: {', '.join(missing)}")
    else:
        base = LLAMA | {"tied": False} if args.gated else {}
    try:
        return ModelShape(**base | given)
    except ValueError as error:
        sizes = " ".join(f"--{option} {given[field]}" for option, field in ALL_SIZES.items() if field in given)
        raise ValueError(f"{sizes}: {error}") from None


if __name__ == "__main__":
    main()
