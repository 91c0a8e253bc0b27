"""Layouts for a model on a cluster: `python -m lib.planner --model llama3-70b --gpus 64 --gpu h100`.

Without a layout it searches for the fastest; with `--tp`, `--pp` and so on it reports on that one, and compares it with
the fastest. `python -m book.explain` takes the same options, beside a configuration of another program.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace

from lib.cost.adapters import BASES, Adapters
from lib.cost.expert_models import EXPERT_MODELS
from lib.cost.experts import ExpertShape
from lib.cost.hardware import BYTES, FLOPS, SPEEDS, TOKENS, Device, amount, gpu_name
from lib.cost.models import NOT_MODELLED, known, same_name
from lib.cost.sizes import BIASES, LLAMA, OPTIMIZERS, PLANNED_RECOMPUTE, ZERO_STAGES, ModelShape, recipe_of_optimizer
from lib.planner import Choices, Cluster, Layout4D, Planned, Training, best_layouts, memory_bytes, step_s
from lib.planner.expert_report import plain_report, report_of_experts
from lib.planner.experts import NO_SECONDS_OF_EXPERTS, ExpertTraining
from lib.planner.fp8 import in_8_bit
from lib.planner.margin import HEADROOM
from lib.planner.refusals import refusal
from lib.planner.report import others_text, report_of_layout, wrapped
from lib.planner.search import ALL_OPEN, layout_text, layouts_by_memory
from lib.planner.training import GPUS, OFFLOADS, PRESET_MODELS, STACKS, stack_for

STEP_TOKENS = 4 * 2**20  # unless --batch gives a number of sequences
SIZES = {"hidden": "d_model", "layers": "num_layers", "heads": "num_heads", "vocab": "vocab_size", "seq": "context"}
ALL_SIZES = SIZES | {"kv-heads": "num_kv_heads", "ffn": "d_mlp", "head-dim": "head_dim"}  # option → of ModelShape
CARD = {  # option → field of Device, units, example and help
    "peak": ("peak_flops", FLOPS, "989TF", "operations per second, dense, in 16 bit"),
    "memory": ("memory_bytes", BYTES, "80GB", "of a GPU"),
    "memory-bandwidth": ("memory_Bps", BYTES, "3.35TB", "per second"),
    "link": ("link_Bps", SPEEDS, "450GB", "per second and GPU inside a node, one direction (data sheets add both)"),
    "network": ("network_Bps", SPEEDS, "50GB or 400Gb", "per second and per GPU, one direction"),
    "network-per-node": ("per_node_Bps", SPEEDS, "400GB or 3200Gb", "instead of --network: of all GPUs of a node"),
}
COUNTS = "tp cp pp dp ep microbatch stages-per-rank replicas every loss-chunks".split()
MORE = {"cp", "recompute", "schedule", "replicas", "every", "loss_chunks"}  # choices beyond the ranks


def main(argv: list[str] | None = None) -> None:
    about = "Which layout for a model and a cluster. For a config.json, or another framework: python -m book.explain."
    parser = trained_options(planner_options("python -m lib.planner", about))
    args = parser.parse_args(argv)
    try:
        print(printed_experts(args) or answered(args))
    except ValueError as error:
        parser.error(str(error))


def planner_options(prog: str, about: str) -> argparse.ArgumentParser:
    """The options of a model, a cluster, a layout and a search; an option that is not given is None."""
    parser = argparse.ArgumentParser(prog=prog, description=about, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    count, on = {"type": _count, "metavar": "N"}, {"action": "store_true"}
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", metavar="NAME", help=f"one of {', '.join((*PRESET_MODELS, *EXPERT_MODELS))}; or its numbers:"
    )
    for option, field in ALL_SIZES.items():
        model.add_argument(f"--{option}", dest=field, **count)
    model.add_argument("--gated", action="store_const", const=True, help="a block as in Llama; what differs:")
    model.add_argument("--biases", choices=BIASES, help="of which linear layers")
    for option in ("rms-norm", "rotary", "dropout-masks", "tied"):
        model.add_argument(f"--{option}", action=argparse.BooleanOptionalAction)
    model.add_argument("--batch", **count, help=f"sequences per step; default: {STEP_TOKENS:,} tokens")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", **count)
    cluster.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default h100); or its figures:")
    for option, (field, units, such_as, text) in CARD.items():
        cluster.add_argument(f"--{option}", dest=field, metavar="SIZE", **_amount(units, such_as, text))
    cluster.add_argument("--per-node", **count, help="GPUs that share the fast link; default: of this GPU, mostly 8")
    cluster.add_argument("--fp8", **on, help="matmuls of the blocks in 8 bit; all bytes stay as they are")
    cluster.add_argument("--stack", default="megatron", metavar="NAME", help=f"one of {', '.join(STACKS)}")
    cluster.add_argument(
        "--whole-gradients",
        dest="whole_gradient_bytes",
        type=int,
        choices=(0, 2, 4),
        help="bytes per parameter of whole gradients that a rank with ZeRO-2 or 3 keeps until the last microbatch, as "
        "Accelerate (2) and fully_shard without sums (2 or 4) do; 0: it reduces each microbatch",
    )
    layout = parser.add_argument_group("layout", "reports on one instead of searching; --dp may be left out")
    for option in COUNTS:
        layout.add_argument(f"--{option}", dest="rows" if option == "microbatch" else None, **count)
    layout.add_argument("--zero", type=int, choices=ZERO_STAGES)
    layout.add_argument("--recompute", choices=PLANNED_RECOMPUTE)
    layout.add_argument("--schedule", choices=("1f1b", "zb-h1", "zb-v"), help="1f1b interleaves stages of a rank")
    search = parser.add_argument_group("search and answers")
    search.add_argument("--context-parallel", **on, help="also split sequences")
    search.add_argument("--zero-bubble", **on, help="also try ZB-H1 and ZB-V")
    search.add_argument("--all-choices", **on, help="also HSDP, recomputation by kind, a loss in pieces")
    search.add_argument(
        "--headroom",
        type=_percent,
        default=HEADROOM,
        metavar="PERCENT",
        help="10%%: of a GPU's memory, that a layout leaves; one that leaves less is tight, and comes last",
    )
    search.add_argument("--best", **count, default=3, help="number of layouts to print")
    search.add_argument("--tokens", **_amount(TOKENS, "15.6T", "of the training, for its days and hours"))
    search.add_argument("--price", type=float, help="of a GPU for an hour, for the money")
    search.add_argument("--json", **on, help="plain data instead of text")
    parser.set_defaults(optimizer="adam", lora=None, base=None, offload=None)
    for name in NOT_MODELLED:
        if not name.endswith("FP8"):  # the name of a model may ask for it, an option asks for matmuls in FP8
            option = f"--{name.split()[-1].lower()}"
            parser.add_argument(option, dest=name, nargs="?", const=True, help=argparse.SUPPRESS)
    return parser


def trained_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of what is trained; not for a command of a different program, which has an --optimizer as well."""
    count = {"type": _count, "metavar": "N"}
    trained = parser.add_argument_group("what is trained, and where it is kept")
    trained.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="its states; muon: memory only")
    trained.add_argument("--lora", **count, help="rank of adapters on all matrices of a frozen model; memory only")
    trained.add_argument("--base", choices=BASES, help="precision of the frozen model; 4bit is QLoRA; default 16bit")
    trained.add_argument("--offload", choices=OFFLOADS, help="to the host: memory only; parameters need ZeRO-3")
    return parser


def answered(args: argparse.Namespace, notes: Sequence[str] = ()) -> str:
    """The report on the options; without seconds where they are not modelled."""
    if args.lora or args.offload or args.optimizer == "muon":
        return printed_memory(args, notes)
    return printed(args, *candidates(args), notes=notes)


def printed_memory(args: argparse.Namespace, notes: Sequence[str] = ()) -> str:
    """The report of a training without seconds, and layouts that fit."""
    asked = options_given(args, Layout4D._fields)
    training = training_asked(args, asked)
    if args.tokens or args.price:
        raise ValueError(f"--tokens and --price need seconds, and {training.no_seconds}")
    choices = Choices(context_parallel=args.context_parallel, zero_bubble=args.zero_bubble, headroom=args.headroom)
    if args.all_choices or asked.keys() & MORE:
        choices = replace(ALL_OPEN, headroom=args.headroom)
    layout = completed_layout(training, asked) if asked else None
    try:
        found, nothing = layouts_by_memory(training, choices, args.best), ""
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
    return "\n\n".join(filter(None, [wrapped(notes), str(report), wrapped(lines)]))


def candidates(args: argparse.Namespace) -> tuple[Training, list[Planned], str]:
    """The training; the layout that is asked for, if one is, and the fastest of a search; how they differ, in words."""
    asked = options_given(args, Layout4D._fields)
    if left_out := options_given(args, NOT_MODELLED):
        raise ValueError(f"{next(iter(left_out))} is not modelled")
    training = training_asked(args, asked)
    mine = layout_asked(training, asked) if asked else None
    usual = Choices(context_parallel=args.context_parallel, zero_bubble=args.zero_bubble, headroom=args.headroom)
    everything = replace(ALL_OPEN, headroom=args.headroom)
    wide = args.all_choices or asked.keys() & MORE  # who asks for more than ranks is compared with all
    try:
        fastest, nothing = best_layouts(training, everything if wide else usual, args.best), ""
    except ValueError as error:
        if not mine:
            raise
        fastest, nothing = [], str(error)
    behind = others_text(fastest, mine, nothing, training.room_bytes, args.headroom)
    return training, [mine or fastest[0], *fastest], behind


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
        raise ValueError(f"{next(iter(changed))} cannot be changed in a model with experts: change its config.json")
    if left_out := options_given(args, NOT_MODELLED):
        raise ValueError(f"{next(iter(left_out))} is not modelled")
    if others := [name for name in ("lora", "offload", "fp8", "whole_gradient_bytes") if getattr(args, name)]:
        option = others[0].replace("whole_gradient_bytes", "whole-gradients")
        raise ValueError(f"--{option} is not modelled for a model with experts: leave it out")
    if args.context_parallel or args.zero_bubble or args.all_choices:
        raise ValueError("layouts with experts are searched over tp, pp, dp and ep only: leave out wider choices")
    if args.tokens or args.price:
        raise ValueError(NO_SECONDS_OF_EXPERTS)
    shape = shape or EXPERT_MODELS[name]
    base = replace(shape.base, context=args.context or shape.base.context)
    asked = options_given(args, (*Layout4D._fields, "ep"))
    of = ExpertTraining(replace(shape, base=base), training_asked(args, asked, base))
    report = report_of_experts(of, asked, notes)
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


def options_given(args: argparse.Namespace, names: Iterable[str]) -> dict:
    """The options of these names that are given."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1
    if not 0 <= percent < 100:
        raise argparse.ArgumentTypeError(f"{text} must be a percentage from 0 to less than 100, such as 10%")
    return percent / 100


def _amount(units: dict[str, float], such_as: str, about: str) -> dict:
    def read(text: str) -> float:
        try:
            return amount(text, units, such_as)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return {"type": read, "help": f"{such_as}: {about}"}


if __name__ == "__main__":
    main()
