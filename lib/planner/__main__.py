"""Layouts for a model on a cluster: `python -m lib.planner --model llama3-70b --gpus 64 --gpu h100`.

Without a layout it searches for the fastest; with `--tp`, `--pp` and so on it evaluates that one, and compares it with
the fastest. With `--rows FILE.json` it predicts published runs instead, and prints the errors.
With `explain` it reads what a command or a file of Megatron-LM, torchtitan, Accelerate or DeepSpeed asks for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace

from lib.cost.hardware import BYTES, FLOPS, SPEEDS, TOKENS, Device, amount
from lib.cost.sizes import BIASES, LLAMA, RECOMPUTE, ZERO_STAGES, ModelShape
from lib.planner.configs import read_config
from lib.planner.explain import FRAMEWORKS, flags_text, layout_asked, read_foreign
from lib.planner.refusals import refusal
from lib.planner.report import report_of_layout
from lib.planner.rows import predict, read_rows
from lib.planner.search import Choices, Planned, best_layouts, memory_bytes
from lib.planner.seconds import step_s
from lib.planner.text import others_text, report_text, rows_json, rows_text
from lib.planner.training import (
    GPUS,
    NOT_MODELLED,
    PRESET_MODELS,
    STACKS,
    Cluster,
    Layout4D,
    Training,
    known,
    stack_for,
)

STEP_TOKENS = 4 * 2**20  # unless --batch gives a number of sequences
SIZES = {"hidden": "d_model", "layers": "num_layers", "heads": "num_heads", "vocab": "vocab_size"}
ALL_SIZES = SIZES | {"kv_heads": "num_kv_heads", "ffn": "d_mlp", "head_dim": "head_dim"}
SWITCHES = "rms_norm", "rotary", "dropout_masks", "tied"
SCHEDULES = "1f1b", "zb-h1", "zb-v"
AXES = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "microbatch": "rows", "stages_per_rank": "stages_per_rank"}
COUNTS = AXES | {"replicas": "replicas", "every": "every", "loss_chunks": "loss_chunks"}
LAYOUT = COUNTS | {"zero": "zero", "recompute": "recompute", "schedule": "schedule"}  # option → field of Layout4D
CARD = {  # option → field of Device, units, help
    "peak": ("peak_flops", FLOPS, "989TF: operations per second, dense, in 16 bit"),
    "memory": ("memory_bytes", BYTES, "80GB"),
    "memory_bandwidth": ("memory_Bps", BYTES, "3.35TB: per second"),
    "link": ("link_Bps", SPEEDS, "450GB: per second and GPU, one direction (data sheets add both), inside a node"),
    "network": ("network_Bps", SPEEDS, "50GB or 400Gb: per second and per GPU, one direction"),
}
OF_FOREIGN = LAYOUT | ALL_SIZES | {name: name for name in ("gated", "biases", *SWITCHES, "gpus", "per_node", "batch")}
OF_FOREIGN |= {"seq": "context"}  # option → field of what `explain` reads
NEEDS = "give --peak, --memory, --memory-bandwidth, --link and --network"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lib.planner", description="Which layout for a model and a cluster.", allow_abbrev=False
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(PRESET_MODELS)}")
    model.add_argument(
        "--config", metavar="FILE", help="or the config.json of a model of Hugging Face; or its numbers:"
    )
    for name in ALL_SIZES:
        model.add_argument(_option(name), type=int, metavar="N")
    model.add_argument("--gated", action="store_true", help="a block as in Llama; what differs is an option:")
    model.add_argument("--biases", choices=BIASES, help="of which linear layers")
    for name in SWITCHES:
        model.add_argument(_option(name), action=argparse.BooleanOptionalAction)
    model.add_argument("--seq", type=int, metavar="TOKENS", help="sequence length; default: of the model")
    model.add_argument("--batch", type=int, metavar="N", help=f"sequences per step; default: {STEP_TOKENS:,} tokens")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, metavar="N")
    cluster.add_argument(
        "--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default h100); or give its figures:"
    )
    for name, (_, _, such_as) in CARD.items():
        cluster.add_argument(_option(name), metavar="AMOUNT", help=such_as)
    cluster.add_argument(
        "--network-per-node", metavar="AMOUNT", help="instead of --network: all GPUs of a node together"
    )
    cluster.add_argument("--per-node", type=int, default=8, metavar="N", help="GPUs that share the fast link")
    cluster.add_argument("--stack", default="megatron", metavar="NAME", help=f"one of {', '.join(STACKS)}")
    layout = parser.add_argument_group("layout", "evaluates one instead of searching; --dp follows if it is left out")
    for name in COUNTS:
        layout.add_argument(_option(name), type=int, metavar="N")
    layout.add_argument("--zero", type=int, choices=ZERO_STAGES)
    layout.add_argument("--recompute", choices=RECOMPUTE)
    layout.add_argument("--schedule", choices=SCHEDULES, help="1f1b is interleaved where a rank has several stages")
    search = parser.add_argument_group("search")
    search.add_argument("--context-parallel", action="store_true", help="also split sequences")
    search.add_argument("--zero-bubble", action="store_true", help="also try ZB-H1 and ZB-V")
    search.add_argument("--best", type=int, default=3, metavar="N", help="number of layouts to print")
    parser.add_argument("--tokens", metavar="AMOUNT", help="15.6T: of the whole training, for its days and GPU hours")
    parser.add_argument("--price", type=float, metavar="AMOUNT", help="of a GPU for an hour, for the money")
    parser.add_argument("--rows", metavar="FILE.json", help="predict the published runs of a file")
    parser.add_argument("--json", action="store_true", help="plain data instead of text")
    for name in NOT_MODELLED:
        parser.add_argument(f"--{name.split()[-1].lower()}", nargs="?", const=name, help=argparse.SUPPRESS)
    parser.set_defaults(notes=[])
    argv = sys.argv[1:] if argv is None else argv
    explains = argv[:1] == ["explain"]
    args = parser.parse_known_args(argv)[0] if explains else parser.parse_args(argv)
    try:
        if explains:
            said = _explained(parser, argv[1:])
        elif args.rows:
            predictions = [predict(row) for row in read_rows(args.rows)]
            said = rows_json(predictions) if args.json else rows_text(predictions)
        else:
            said = _planned(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(said if isinstance(said, str) else json.dumps(said, indent=1))


def _explained(parser: argparse.ArgumentParser, argv: list[str]) -> str | dict:
    """The report of what a foreign command or file asks for, flag by flag; our own options overrule it."""
    asked = read_foreign(parser.parse_known_args(argv)[1])
    options = {name: asked.found[field] for name, field in OF_FOREIGN.items() if field in asked.found}
    parser.set_defaults(stack=FRAMEWORKS[asked.framework]["stack"], **options)
    args = parser.parse_known_args(argv)[0]
    own = {field: getattr(args, name) for name, field in LAYOUT.items() if getattr(args, name) is not None}
    asked.found.update(own)
    training, layout = layout_asked(asked, _training(args, own), args.batch)
    report = report_of_layout(training, layout, *_answers(args))
    if args.json:
        return {"layout": layout._asdict()} | asdict(report) | {"by": asked.by, "notes": asked.notes + args.notes}
    return "\n\n".join([flags_text(asked, training, layout), *args.notes, report_text(report)])


def _planned(args: argparse.Namespace) -> str | dict:
    """The report of the layout that is asked for, or of the fastest, and the other layouts of the search."""
    for name in NOT_MODELLED:
        if getattr(args, option := name.split()[-1].lower()):
            raise ValueError(f"--{option}: {name} is not modelled")
    asked = {field: getattr(args, name) for name, field in LAYOUT.items() if getattr(args, name) is not None}
    training = _training(args, asked)
    mine, split = _mine(training, asked) if asked else None, args.context_parallel or asked.get("cp", 1) > 1
    choices = Choices(context_parallel=split, zero_bubble=args.zero_bubble or "zb" in asked.get("schedule", ""))
    try:
        found = best_layouts(training, choices, _positive(args, "best"))
    except ValueError as error:
        if not mine:
            raise
        found, nothing = [], str(error)
    report = report_of_layout(training, (mine or found[0]).layout, *_answers(args))
    if args.json:
        of_training = {"gpus": training.cluster.gpus, "global_batch": training.global_batch}
        each = {"layout": (mine or found[0]).layout._asdict()} | asdict(report)
        reports = [{"layout": one.layout._asdict()} | asdict(report_of_layout(training, one.layout)) for one in found]
        return (
            {"model": asdict(training.model)}
            | of_training
            | {"report": each, "layouts": reports, "notes": args.notes}
        )
    return "\n\n".join([*args.notes, report_text(report), others_text(found, mine) if found else nothing])


def _answers(args: argparse.Namespace) -> tuple[float, float]:
    """Tokens of the whole training and the price of a GPU for an hour, or zeros."""
    return amount(args.tokens, "--tokens", TOKENS, "15.6T or 300B") if args.tokens else 0, args.price or 0


def _mine(training: Training, asked: Mapping[str, int | str]) -> Planned:
    """The layout that is asked for; what is left out follows."""
    axes = {axis: asked.get(axis, 1) for axis in ("tp", "cp", "pp")}
    dp = asked.get("dp") or max(1, training.cluster.gpus // (axes["tp"] * axes["cp"] * axes["pp"]))
    zero = {"zero": int(dp * axes["cp"] > 1), "sequence_parallel": axes["tp"] > 1}
    layout = Layout4D(**axes | {"dp": dp} | zero | asked)
    if why := refusal(training, layout):
        raise ValueError(why)
    return Planned(layout, step_s(training, layout), memory_bytes(training, layout))


def _training(args: argparse.Namespace, asked: Mapping[str, int | str]) -> Training:
    for name in COUNTS:
        _positive(args, name, needed=False)
    if args.gpus is None and "dp" in asked:
        args.gpus = asked["dp"] * asked.get("tp", 1) * asked.get("cp", 1) * asked.get("pp", 1)
    model, gpus, per_node = _model(args), _positive(args, "gpus"), _positive(args, "per_node")
    name, device = _device(args, per_node)
    if gpus > per_node and device.network_Bps is None:
        raise ValueError(f"the network bandwidth of {name} is not published: give --network, such as --network 25GB")
    batch = _positive(args, "batch", needed=False) or max(1, STEP_TOKENS // model.context)
    return Training(model, Cluster(device, gpus, per_node), stack_for(args.stack, name), batch)


def _device(args: argparse.Namespace, per_node: int) -> tuple[str, Device]:
    """A preset, perhaps with other figures, or a GPU of five figures."""
    given = {}
    for name, (field, units, such_as) in CARD.items():
        if getattr(args, name):
            given[field] = amount(getattr(args, name), _option(name), units, such_as.partition(":")[0])
    if args.network_per_node:
        if args.network:
            raise ValueError("--network is per GPU and --network-per-node of a whole node: give one of them")
        given["network_Bps"] = (
            amount(args.network_per_node, "--network-per-node", SPEEDS, "400GB or 3200Gb") / per_node
        )
    name = args.gpu or ("h100" if not given.keys() - {"memory_bytes", "network_Bps"} else "without a name")
    if given.keys() >= {field for field, *_ in CARD.values()} - {"network_Bps"} and name.lower() not in GPUS:
        return name, Device(**{"network_Bps": None} | given, matmul_flops=None, source="given")
    preset = known(name, GPUS, "GPU", NEEDS)
    return preset, replace(GPUS[preset], **given)


def _model(args: argparse.Namespace) -> ModelShape:
    """A preset, perhaps with other sizes, or a model of all sizes."""
    given = {field: _positive(args, name) for name, field in ALL_SIZES.items() if getattr(args, name) is not None}
    options = " ".join(f"{_option(name)} {given[field]}" for name, field in ALL_SIZES.items() if field in given)
    given |= {name: getattr(args, name) for name in ("biases", *SWITCHES) if getattr(args, name) is not None}
    given |= {"context": _positive(args, "seq")} if args.seq is not None else {}
    if args.config:
        shape, args.notes = read_config(args.config, args.seq)
        base = asdict(shape)
    elif args.model:
        base = asdict(
            PRESET_MODELS[known(args.model, PRESET_MODELS, "model", "give its sizes, such as --hidden 4096")]
        )
    elif missing := [_option(name) for name, field in (SIZES | {"seq": "context"}).items() if field not in given]:
        raise ValueError(f"give --model, or all its numbers; missing: {', '.join(missing)}")
    else:
        base = LLAMA | {"tied": False} if args.gated else {}
    try:
        return ModelShape(**base | given)
    except ValueError as error:
        raise ValueError(f"{options}: {error}") from None


def _positive(args: argparse.Namespace, name: str, needed: bool = True) -> int | None:
    value = getattr(args, name)
    if (value is None and needed) or (value is not None and value < 1):
        raise ValueError(f"{_option(name)}{'' if value is None else f' {value}'} must be at least 1")
    return value


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    main()
