"""Layouts for a model on a cluster: `python -m lib.planner --model llama-70b --gpus 64 --gpu h100`.

With `--rows FILE.json` it predicts published runs instead, and prints the errors.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace

from lib.cost.sizes import LLAMA, ModelShape
from lib.planner.configs import read_config
from lib.planner.explain import flags_text, layout_asked, model_asked, read_foreign
from lib.planner.rows import predict, read_rows
from lib.planner.search import Choices, Planned, best_layouts, memory_bytes
from lib.planner.seconds import step_s
from lib.planner.text import layouts_json, layouts_text, rows_json, rows_text
from lib.planner.training import GPUS, PRESET_MODELS, STACKS, Cluster, Training, known, stack_for

TOKENS = 4 * 2**20  # of a step, unless --batch gives a number of sequences
SIZES = {"hidden": "d_model", "layers": "num_layers", "heads": "num_heads", "vocab": "vocab_size"}
ALL_SIZES = SIZES | {"kv_heads": "num_kv_heads", "ffn": "d_mlp"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lib.planner",
        description="Which layout for a model and a cluster. `explain FILE` or `explain FLAGS` "
        "reads that of Megatron-LM, torchtitan, Accelerate or DeepSpeed.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="NAME", help=f"one of {', '.join(PRESET_MODELS)}; or give its numbers:")
    for name in ALL_SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, metavar="N")
    parser.add_argument("--config", metavar="FILE", help="or the config.json of a model of Hugging Face")
    parser.add_argument("--gated", action="store_true", help="three MLP matrices, no biases, as in Llama")
    parser.add_argument("--seq", type=int, metavar="TOKENS", help="sequence length; default: of the model")
    parser.add_argument("--gpus", type=int, metavar="N")
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--per-node", type=int, default=8, metavar="N", help="GPUs that share the fast link")
    speed = "bandwidth per GPU, one direction: 50GB or 400Gb, per second"
    parser.add_argument("--network", metavar="SPEED", help=speed)
    parser.add_argument("--memory", metavar="SIZE", help="memory per GPU: 80GB")
    parser.add_argument("--batch", type=int, metavar="N", help=f"sequences per step; default: {TOKENS:,} tokens")
    parser.add_argument("--stack", default="megatron", metavar="NAME", help=f"one of {', '.join(STACKS)}")
    parser.add_argument("--context-parallel", action="store_true", help="also split sequences")
    parser.add_argument("--zero-bubble", action="store_true", help="also try ZB-H1 and ZB-V")
    parser.add_argument("--best", type=int, default=3, metavar="N", help="number of layouts to print")
    parser.add_argument("--rows", metavar="FILE.json", help="predict the published runs of a file")
    parser.add_argument("--json", action="store_true", help="plain data instead of a table")
    argv = sys.argv[1:] if argv is None else argv
    explains = argv[:1] == ["explain"]
    args, foreign = parser.parse_known_args(argv[1:]) if explains else (parser.parse_args(argv), [])
    try:
        if explains:
            said = _explained(args, foreign)
        elif args.rows:
            predictions = [predict(row) for row in read_rows(args.rows)]
            said = rows_json(predictions) if args.json else rows_text(predictions)
        else:
            training = _training(args)
            choices = Choices(context_parallel=args.context_parallel, zero_bubble=args.zero_bubble)
            found = best_layouts(training, choices, _positive(args, "best"))
            said = layouts_json(training, found) if args.json else layouts_text(training, found)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(said if isinstance(said, str) else json.dumps(said, indent=1))


def _explained(args: argparse.Namespace, foreign: list[str]) -> str | dict:
    """What a foreign command asks for; our own options overrule it."""
    asked = read_foreign(foreign)
    found = asked.found
    if "gpus" not in found and {"nodes", "per_node"} <= found.keys():
        found["gpus"] = found["nodes"] * found["per_node"]
    args.gpus = args.gpus or found.get("gpus")
    args.seq = args.seq or found.get("context")
    asked.found["context"] = args.seq
    args.shape = None if args.model or args.config or args.hidden else model_asked(asked)
    training, layout = layout_asked(asked, _training(args), args.batch)
    planned = Planned(layout, step_s(training, layout), memory_bytes(training, layout))
    if args.json:
        return layouts_json(training, [planned]) | {"by": asked.by, "notes": asked.notes}
    return f"{flags_text(asked, training, layout)}\n\n{layouts_text(training, [planned])}"


def _training(args: argparse.Namespace) -> Training:
    model = _model(args)
    if args.seq is not None:
        model = replace(model, context=_positive(args, "seq"))
    gpu = known(args.gpu.lower(), GPUS, "GPU")
    device = GPUS[gpu]
    if args.network:
        device = replace(device, network_Bps=_bytes(args.network, "--network", bits=True))
    if args.memory:
        device = replace(device, memory_bytes=_bytes(args.memory, "--memory", bits=False))
    if device.network_Bps is None:
        raise ValueError(f"the network bandwidth of {gpu} is not published: give --network, such as --network 25GB")
    batch = _positive(args, "batch") if args.batch is not None else max(1, TOKENS // model.context)
    cluster = Cluster(device, _positive(args, "gpus"), _positive(args, "per_node"))
    return Training(model, cluster, stack_for(args.stack, gpu), batch)


def _model(args: argparse.Namespace) -> ModelShape:
    given = {field: _positive(args, name) for name, field in ALL_SIZES.items() if getattr(args, name) is not None}
    if getattr(args, "shape", None):
        return args.shape
    if args.config:
        shape, args.notes = read_config(args.config, args.seq)
        return shape
    if args.model:
        return replace(PRESET_MODELS[known(args.model.lower(), PRESET_MODELS, "model")], **given)
    missing = [f"--{name}" for name, field in SIZES.items() if field not in given] + ([] if args.seq else ["--seq"])
    if missing:
        raise ValueError(f"give --model, or all its numbers; missing: {', '.join(missing)}")
    return ModelShape(context=args.seq, tied=not args.gated, **(LLAMA if args.gated else {}), **given)


def _positive(args: argparse.Namespace, name: str) -> int:
    value = getattr(args, name)
    if value is None or value < 1:
        raise ValueError(f"--{name.replace('_', '-')}{'' if value is None else f' {value}'} must be at least 1")
    return value


def _bytes(text: str, name: str, bits: bool) -> float:
    """Bytes of `80GB`, `80GiB`, or where bits are usual `400Gb`."""
    match = re.fullmatch(r"([\d.]+)\s*(GB|GiB|Gb|Gbit)(?:/s|ps)?", text)
    if not match or not float(match[1]):
        raise ValueError(f"{name} {text} needs a number and a unit: 50GB" + (" or 400Gb" if bits else ""))
    number, unit = float(match[1]), match[2]
    if unit in ("Gb", "Gbit") and not bits:
        raise ValueError(
            f"{name} {text} are gigabits, {number / 8:g} gigabytes; memory is sold in bytes: {number:g}GB"
        )
    return number * {"GB": 1e9, "GiB": 2**30, "Gb": 1e9 / 8, "Gbit": 1e9 / 8}[unit]


if __name__ == "__main__":
    main()
