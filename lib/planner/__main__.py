"""Layouts for a model on a cluster: `python -m lib.planner --model llama3-70b --gpus 64 --gpu h100`.

Without a layout it searches for the fastest; with `--tp`, `--pp` and so on it reports on that one, and compares it with
the fastest. With `--rows FILE.json` it predicts published runs instead, and prints the errors. `explain
FILE` or `explain FLAGS` reports on what a command of Megatron-LM, torchtitan, Accelerate or DeepSpeed asks for.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace

from lib.cost.hardware import BYTES, FLOPS, SPEEDS, TOKENS, Device, amount
from lib.cost.models import NOT_MODELLED, known
from lib.cost.sizes import BIASES, LLAMA, PLANNED_RECOMPUTE, ZERO_STAGES, ModelShape
from lib.planner import Choices, Cluster, Layout4D, Planned, Training, best_layouts, memory_bytes, step_s
from lib.planner.configs import notes_text, read_config
from lib.planner.explain import completed, flags_text, read_foreign
from lib.planner.refusals import refusal
from lib.planner.report import report_of_layout
from lib.planner.rows import predict, read_rows
from lib.planner.search import ALL_OPEN
from lib.planner.text import others_text, report_text, rows_json, rows_text
from lib.planner.training import GPUS, PRESET_MODELS, STACKS, stack_for

STEP_TOKENS = 4 * 2**20  # unless --batch gives a number of sequences
SIZES = {"hidden": "d_model", "layers": "num_layers", "heads": "num_heads", "vocab": "vocab_size", "seq": "context"}
ALL_SIZES = SIZES | {"kv-heads": "num_kv_heads", "ffn": "d_mlp", "head-dim": "head_dim"}  # option → of ModelShape
SWITCHES = "rms-norm", "rotary", "dropout-masks", "tied"
CARD = {  # option → field of Device, units, example and help
    "peak": ("peak_flops", FLOPS, "989TF", "operations per second, dense, in 16 bit"),
    "memory": ("memory_bytes", BYTES, "80GB", "of a GPU"),
    "memory-bandwidth": ("memory_Bps", BYTES, "3.35TB", "per second"),
    "link": ("link_Bps", SPEEDS, "450GB", "per second and GPU inside a node, one direction (data sheets add both)"),
    "network": ("network_Bps", SPEEDS, "50GB or 400Gb", "per second and per GPU, one direction"),
    "network-per-node": ("per_node_Bps", SPEEDS, "400GB or 3200Gb", "instead of --network: of all GPUs of a node"),
}
COUNTS = "tp cp pp dp microbatch stages-per-rank replicas every loss-chunks".split()
MORE = {"cp", "recompute", "schedule", "replicas", "every", "loss_chunks"}  # choices beyond the ranks
NEEDS = "give --peak, --memory, --memory-bandwidth, --link and --network"


def main(argv: list[str] | None = None) -> None:
    about = "Which layout for a model and a cluster. `explain FILE` or `explain FLAGS`: that of another framework."
    parser = argparse.ArgumentParser(prog="python -m lib.planner", description=about, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    _add_options(parser)
    parser.set_defaults(notes=[])
    argv = sys.argv[1:] if argv is None else argv
    explains = argv[:1] == ["explain"]
    args = parser.parse_known_args(argv)[0] if explains else parser.parse_args(argv)
    try:
        if explains:
            said = _explained(parser, argv[1:])
        elif args.runs:
            predictions = [predict(row) for row in read_rows(args.runs)]
            said = rows_json(predictions) if args.json else rows_text(predictions)
        else:
            said = _answer(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(said if isinstance(said, str) else json.dumps(said, indent=1))


def _add_options(parser: argparse.ArgumentParser) -> None:
    count = {"type": _count, "metavar": "N"}
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(PRESET_MODELS)}")
    model.add_argument("--config", metavar="FILE", help="or a config.json of Hugging Face; or give its numbers:")
    for option, field in ALL_SIZES.items():
        model.add_argument(f"--{option}", dest=field, **count)
    model.add_argument("--gated", action="store_const", const=True, help="a block as in Llama; what differs:")
    model.add_argument("--biases", choices=BIASES, help="of which linear layers")
    for option in SWITCHES:
        model.add_argument(f"--{option}", action=argparse.BooleanOptionalAction)
    model.add_argument("--batch", **count, help=f"sequences per step; default: {STEP_TOKENS:,} tokens")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", **count)
    cluster.add_argument(
        "--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default h100); or give its figures:"
    )
    for option, (field, units, such_as, text) in CARD.items():
        read = _read(units, such_as)
        cluster.add_argument(f"--{option}", dest=field, type=read, metavar="SIZE", help=f"{such_as}: {text}")
    cluster.add_argument("--per-node", **count, default=8, help="GPUs that share the fast link")
    cluster.add_argument("--stack", default="megatron", metavar="NAME", help=f"one of {', '.join(STACKS)}")
    layout = parser.add_argument_group("layout", "reports on one instead of searching; --dp may be left out")
    for option in COUNTS:
        layout.add_argument(f"--{option}", dest="rows" if option == "microbatch" else None, **count)
    layout.add_argument("--zero", type=int, choices=ZERO_STAGES)
    layout.add_argument("--recompute", choices=PLANNED_RECOMPUTE)
    layout.add_argument(
        "--schedule", choices=("1f1b", "zb-h1", "zb-v"), help="1f1b interleaves several stages per rank"
    )
    search = parser.add_argument_group("search and answers")
    search.add_argument("--context-parallel", action="store_true", help="also split sequences")
    search.add_argument("--zero-bubble", action="store_true", help="also try ZB-H1 and ZB-V")
    search.add_argument(
        "--all-choices", action="store_true", help="also HSDP, recomputation by kind, a loss in pieces"
    )
    search.add_argument("--best", **count, default=3, help="number of layouts to print")
    search.add_argument(
        "--tokens", type=_read(TOKENS, "15.6T"), help="15.6T: of the training, for its days and hours"
    )
    search.add_argument("--price", type=float, help="of a GPU for an hour, for the money")
    search.add_argument("--rows", dest="runs", metavar="FILE.json", help="predict the published runs of a file")
    search.add_argument("--json", action="store_true", help="plain data instead of text")
    for name in NOT_MODELLED:
        parser.add_argument(f"--{name.split()[-1].lower()}", dest=name, nargs="?", const=True, help=argparse.SUPPRESS)


def _explained(parser: argparse.ArgumentParser, argv: list[str]) -> str | dict:
    """The report of what a foreign command or file asks for, flag by flag; our own options overrule it."""
    asked = read_foreign(parser.parse_known_args(argv)[1])
    parser.set_defaults(**asked.found)
    args = parser.parse_known_args(argv)[0]
    own = {name: n for name, n in _given(args, Layout4D._fields).items() if n != asked.found.get(name)}
    asked.found.update(own)
    asked.by.update({name: f"--{name} {n}" for name, n in own.items()})
    training, fields_of_layout = completed(asked, _training(args, asked.found), args.batch)
    planned = _mine(training, fields_of_layout)
    report = report_of_layout(training, planned.layout, args.tokens or 0, args.price or 0)
    asked.notes.extend(f"not modelled: {name}" for name in _given(args, NOT_MODELLED))
    if args.json:
        each = {"layout": planned.layout._asdict()} | asdict(report)
        return asdict(training) | {"by": asked.by, "notes": args.notes + asked.notes, "report": each}
    said = flags_text(asked, training, planned), notes_text(args.notes), report_text(report)
    return "\n\n".join(filter(None, said))


def _answer(args: argparse.Namespace) -> str | dict:
    """The report of the layout that is asked for, or of the fastest, and the fastest layouts of the search.

    Who asks for more than ranks is compared with every choice.
    """
    if names := [*_given(args, NOT_MODELLED)]:
        raise ValueError(f"{names[0]} is not modelled")
    asked = _given(args, Layout4D._fields)
    training = _training(args, asked)
    mine = _mine(training, asked) if asked else None
    wide = args.all_choices or asked.keys() & MORE
    usual = Choices(context_parallel=args.context_parallel, zero_bubble=args.zero_bubble)
    try:
        found, nothing = best_layouts(training, ALL_OPEN if wide else usual, args.best), ""
    except ValueError as error:
        if not mine:
            raise
        found, nothing = [], str(error)
    layouts = [mine or found[0], *found]
    reports = [report_of_layout(training, one.layout, args.tokens or 0, args.price or 0) for one in layouts]
    if not args.json:
        said = notes_text(args.notes), report_text(reports[0]), others_text(found, mine, nothing)
        return "\n\n".join(filter(None, said))
    plain = [{"layout": one.layout._asdict()} | asdict(report) for one, report in zip(layouts, reports, strict=True)]
    return asdict(training) | {"report": plain[0], "layouts": plain[1:], "notes": args.notes}


def _training(args: argparse.Namespace, asked: dict) -> Training:
    gpus = args.gpus or math.prod(asked.get(axis, 1) for axis in ("tp", "cp", "pp", "dp")) * ("dp" in asked)
    if not gpus:
        raise ValueError("give --gpus, the number of all GPUs")
    model, (name, device) = _model(args), _device(args)
    if gpus > args.per_node and device.network_Bps is None:
        raise ValueError(f"{gpus} GPUs of {name} are on several nodes: give --network, such as 25GB per GPU")
    batch = args.batch or max(1, STEP_TOKENS // model.context)
    return Training(model, Cluster(device, gpus, args.per_node), stack_for(args.stack, name), batch)


def _mine(training: Training, asked: dict) -> Planned:
    """The layout that is asked for: ranks that are left out follow."""
    tp, cp, pp = (asked.get(axis, 1) for axis in ("tp", "cp", "pp"))
    axes = {"tp": tp, "cp": cp, "pp": pp, "dp": max(1, training.cluster.gpus // (tp * cp * pp))} | asked
    layout = Layout4D(
        **{"zero": 3 if "replicas" in asked else int(axes["dp"] * cp > 1), "sequence_parallel": tp > 1} | axes
    )
    if why := refusal(training, layout):
        raise ValueError(why)
    return Planned(layout, step_s(training, layout), memory_bytes(training, layout))


def _device(args: argparse.Namespace) -> tuple[str, Device]:
    """A preset, perhaps with other figures, or a GPU of its own figures."""
    given = _given(args, [field.name for field in fields(Device)])
    if args.per_node_Bps:
        if "network_Bps" in given:
            raise ValueError("--network is per GPU and --network-per-node of a whole node: give one of them")
        given["network_Bps"] = args.per_node_Bps / args.per_node
    figures = {"peak_flops", "memory_Bps", "link_Bps"} & given.keys()
    name = args.gpu or ("without a name" if figures else "h100")
    if len(figures) == 3 and "memory_bytes" in given and name.lower() not in GPUS:
        return name, Device(**{"network_Bps": None} | given, matmul_flops=None, source="given")
    name = known(name, GPUS, "GPU", NEEDS)
    return name, replace(GPUS[name], **given)


def _model(args: argparse.Namespace) -> ModelShape:
    """A preset, perhaps with changed sizes, or a model of given sizes."""
    given = _given(args, [field.name for field in fields(ModelShape)])
    if args.model and args.config:
        raise ValueError("--model and --config both name a model: give one of them")
    if args.config:
        shape, args.notes = read_config(args.config, args.context)
        base = asdict(shape)
    elif args.model:
        name = known(args.model, PRESET_MODELS, "model", "give its sizes, such as --hidden 4096, or --config")
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


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict:
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def _read(units: dict[str, float], such_as: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return amount(text, units, such_as)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


if __name__ == "__main__":
    main()
