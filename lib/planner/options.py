"""The options of `python -m lib.planner`, which `python -m book.explain` takes as well."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from difflib import get_close_matches

from lib.cost.adapters import BASES
from lib.cost.expert_models import EXPERT_MODELS
from lib.cost.hardware import BYTES, FLOPS, SPEEDS, TOKENS, amount
from lib.cost.models import NOT_MODELLED
from lib.cost.sizes import BIASES, OPTIMIZERS, PLANNED_RECOMPUTE, ZERO_STAGES
from lib.layout import ATTENTION
from lib.planner.margin import HEADROOM
from lib.planner.sweep import SWEPT
from lib.planner.training import GPUS, OFFLOADS, PRESET_MODELS, STACKS

BEST = 3  # layouts, unless --best gives their number
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


def planner_options(prog: str, about: str) -> argparse.ArgumentParser:
    """The options of a model, a cluster, a layout and a search; an option that is not given is None."""
    parser = argparse.ArgumentParser(prog=prog, description=about, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}{_meant(parser, message)}\n")
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
    layout.add_argument("--attention", choices=ATTENTION, help="over cp; default: that of the stack")
    layout.add_argument("--schedule", choices=("1f1b", "zb-h1", "zb-v"), help="1f1b interleaves stages of a rank")
    search = parser.add_argument_group("search and answers")
    search.add_argument(
        "--context-parallel",
        action=argparse.BooleanOptionalAction,
        help="split sequences, or never; default: if the library of the stack can",
    )
    search.add_argument("--zero-bubble", **on, help="also try ZB-H1 and ZB-V, whichever library the stack has")
    search.add_argument("--all-choices", **on, help="of all libraries: HSDP, each recomputation, a loss in pieces")
    search.add_argument(
        "--sweep", choices=SWEPT, help="the best layout for a row of values, and why throughput falls"
    )
    search.add_argument(
        "--headroom",
        type=_percent,
        default=HEADROOM,
        metavar="PERCENT",
        help="10%%: of a GPU's memory, that a layout leaves; one that leaves less is tight, and comes last",
    )
    search.add_argument("--best", **count, help=f"number of layouts to print; default: {BEST}")
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


def _meant(parser: argparse.ArgumentParser, message: str) -> str:
    """The option whose name is nearest to one that does not exist, in words; nothing for all other messages."""
    unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
    near = unknown and get_close_matches(unknown[1], re.findall(r"--[\w-]+", parser.format_usage()), n=2)
    return f"; or did you mean {' or '.join(near)}" if near else ""


def options_given(args: argparse.Namespace, names: Iterable[str]) -> dict:
    """The options of these names that are given."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def option_of(field: str) -> str:
    """The option that sets a field: `--microbatch` sets `rows`."""
    options = {name: option for option, name in ALL_SIZES.items()}
    options |= {"rows": "microbatch", "whole_gradient_bytes": "whole-gradients"}
    return "--" + options.get(field, field.replace("_", "-"))


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
