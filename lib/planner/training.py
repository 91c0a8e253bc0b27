"""The model to train, the cluster, the software and the layout; and those with a usual name.

The problem: a planner with forty inputs is too much work to use, and a planner with five hides its assumptions. The
idea: a model (`lib.cost.sizes`), a cluster, a layout; and a stack, which has all assumptions: the fractions of
data-sheet figures that a GPU reaches with its software.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lib.cost.adapters import Adapters
from lib.cost.hardware import GPUS, Device, gpu_name
from lib.cost.models import PRESETS, known
from lib.cost.sizes import LLAMA, MODELS, ModelShape, Recipe, train_flops
from lib.layout import whole_number
from lib.planner.fp8 import in_8_bit
from lib.planner.stacks import CALIBRATED, SHARES, STACKS, Stack, stack_for  # noqa: F401 their old place


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind (`lib.cost.hardware`), so many in all; those of a node, `per_node`, share the fast link."""

    device: Device
    gpus: int
    per_node: int = 8

    def bandwidth(self, stack: Stack, ranks: int, stride: int) -> float:
        """Bytes per second, one direction, of each rank of a group whose neighbours are `stride` ranks apart.

        Inside a node, the link. Across nodes, the network cards of the GPUs of the group on a node, in one direction,
        because its ring enters and leaves each node once; never more than the link.
        """
        on_a_node = max(1, min(ranks, self.per_node // stride))
        link = self.device.link_among(on_a_node) * stack.link_share
        if ranks * stride <= self.per_node:
            return link
        network = (self.device.network_Bps or 0) * stack.network_share
        return min(link, on_a_node * network)

    def where(self, consecutive: int) -> str:
        """Whether messages among so many consecutive ranks leave a node, in words."""
        return "inside a node" if consecutive <= self.per_node else "between nodes"


OFFLOADS = "optimizer", "parameters"
NO_SECONDS = {
    "adapters": "LoRA computes no gradients of frozen weights, and no published run here has it",
    "offload": "offload moves bytes to the host and back, over a link that is not known here",
    "muon": "Muon multiplies each gradient with itself several times, and gathers it first",
}


@dataclass(frozen=True, eq=False)  # compared by identity, so that caches find it quickly
class Training:
    """A training run whose layout is open: `model.context` is s, `global_batch` sequences of a step over all GPUs.

    Args:
        adapters: they are trained, and the model is frozen; None: all parameters are trained.
        offload: `optimizer`: its states and the master copy are in the memory of the host; `parameters`: shards of
            parameters and gradients as well, with ZeRO-3.
        optimizer: of `lib.cost.sizes.OPTIMIZERS`; the stack's recipe has its bytes.
    """

    model: ModelShape
    cluster: Cluster
    stack: Stack
    global_batch: int
    adapters: Adapters | None = None
    offload: str = ""
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        if self.offload not in ("", *OFFLOADS):
            raise ValueError(f"offload={self.offload!r} must be one of {', '.join(OFFLOADS)}")
        whole_number("gpus", self.cluster.gpus, 1)
        whole_number("per_node", self.cluster.per_node, 1)
        whole_number("global_batch", self.global_batch, 1)

    @cached_property
    def block_parameters(self) -> int:
        return self.model.num_block_parameters

    @cached_property
    def end_parameters(self) -> int:
        """Parameters of the embedding; the head has the same number."""
        return self.model.vocab_size * self.model.d_model

    @property
    def no_seconds(self) -> str:
        """Why the seconds of this training are not modelled, in a sentence; empty if they are."""
        holds = {"adapters": self.adapters, "offload": self.offload, "muon": self.optimizer == "muon"}
        return "; ".join(f"seconds are not modelled: {NO_SECONDS[name]}" for name, is_so in holds.items() if is_so)

    @property
    def room_bytes(self) -> float:
        """Memory of a GPU for all bytes that `memory_bytes` counts."""
        return self.cluster.device.memory_bytes * self.stack.usable_share

    def utilisation(self, step_s: float, recompute: str = "none", every: int = 1, causal: bool = False) -> float:
        """MFU: operations per second of the model as a fraction of the total peak; with `recompute`, HFU.

        It counts the full attention matrix, or half of it if `causal`. A causal kernel leaves out half: for long
        sequences the full one is more than GPUs really compute. One block in `every` recomputes.
        """
        plain, again = (train_flops(self.model, self.global_batch, how, causal) for how in ("none", recompute))
        return (plain + (again - plain) / every) / step_s / self.cluster.gpus / self.cluster.device.peak_flops


class Layout4D(NamedTuple):
    """A layout in the notation of planners and papers: one that is proposed, for any library.

    It may be impossible. A `lib.layout.Layout` is one that this library runs, and raises an error otherwise; it counts
    microbatches where a planner counts their sequences.

    Args:
        tp, cp, pp, dp: ranks along each axis; from the innermost to the outermost.
        rows: sequences of a microbatch, b.
        stages_per_rank: of an interleaved pipeline, v; 1: 1F1B.
        zero: stage of ZeRO over dp·cp.
        sequence_parallel: with tp.
        recompute: `none`; `selective`, inside of attention; `mlp`; `ops`, by operation as torchtitan does; or `full`.
        schedule: of a pipeline: `1f1b`, interleaved if v > 1; `zb-h1`, with one stage per rank; or `zb-v`, with two.
        replicas: of the model; ZeRO shards over dp·cp / replicas ranks. Above 1 it is HSDP.
        every: recompute one block in so many.
        loss_chunks: pieces of the sequence, of which one at a time has logits.
        attention: over cp: `gather`, `ring` or `ulysses` (`lib.planner.context`); empty: that of the software.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    rows: int = 1
    stages_per_rank: int = 1
    zero: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    schedule: str = "1f1b"
    replicas: int = 1
    every: int = 1
    loss_chunks: int = 1
    attention: str = ""

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.dp * self.cp // self.replicas

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def group(self, axis: str) -> tuple[int, int]:
        """Ranks that send to each other along an axis, and the consecutive ranks among which they are.

        Along dp they are all that share gradients, with the ranks of cp.
        """
        inner = self.tp * self.cp
        groups = {"tp": (self.tp, self.tp), "cp": (self.cp, inner), "pp": (self.pp, self.gpus)}
        return (groups | {"dp": (self.dp * self.cp, inner * self.dp)})[axis]

    def microbatches(self, global_batch: int) -> float:
        """m of a step."""
        return global_batch / (self.dp * self.rows)


_NAMES = {"llama-7b": "7B", "llama-13b": "13B", "llama-70b": "70B", "gpt-175b": "175B", "llama-405b": "405B"}
PRESET_MODELS: dict[str, ModelShape] = {name: MODELS[short] for name, short in _NAMES.items()} | PRESETS

# ---- a published run ------------------------------------------------------------------------------------------------

CARD_OF = {("titan", "h100"): "h100-500w"}  # torchtitan's have 96 GB and 500 W
SAME = {"selective (per operation)": "ops"}
STACK_OF = dict.fromkeys(("sc21", "korthikanti", "zb"), "megatron-2021") | {
    "aa": "aleph-alpha",
    "llama3": "llama3",
    "mosaic": "fsdp1-eager",
    "bridge": "megatron",
    "nemo-2024": "megatron-2024",
    "kempner": "kempner-forge",
}
RUN_FSDP = {"titan", "ibm", "kempner"}  # publishers who run FSDP, also where nothing is sharded


def training_of(row: Mapping) -> tuple[Training, Layout4D]:
    """The training run of a row, and its layout; keys of a row as in `book/published/runs.json`.

    Raises:
        ValueError: a GPU that is unknown, or has no FP8 for a row in FP8; a network that is not known and needed; an
            optimizer in words without its bytes.
    """
    gpu = gpu_of(row)
    gated = bool(row.get("gated"))
    kind = LLAMA if gated else {"dropout_masks": not (row.get("flash") or row.get("fp8"))}
    model = ModelShape(
        row["hidden"],
        row["layers"],
        row["heads"],
        row["vocab"],
        row["seq"],
        row.get("kv_heads") or row["heads"],
        row.get("ffn") or 4 * row["hidden"],
        tied=not gated,
        **kind,
    )
    recompute = row.get("recompute", "none")
    layout = Layout4D(
        row["tp"],
        row.get("cp", 1),
        row["pp"],
        row["dp"],
        rows=row["microbatch"],
        stages_per_rank=row.get("interleave", 1),
        zero=int(row.get("zero", 0)),
        sequence_parallel=bool(row.get("sequence_parallel")) and row["tp"] > 1,
        recompute=SAME.get(recompute, recompute),
        schedule=row.get("schedule", "1f1b"),
        replicas=row.get("replicas", 1),
        attention=row.get("attention", ""),
    )
    device, stack = GPUS[gpu], stack_for(stack_of(row), gpu)
    if row.get("fp8"):
        stack = in_8_bit(stack, gpu)
    if "network_GBps" in row:
        device = replace(device, network_Bps=row["network_GBps"] * 1e9)
    cluster = Cluster(device, row["gpus"], row.get("per_node", device.per_node))
    if cluster.gpus > cluster.per_node and device.network_Bps is None:
        raise ValueError(f"{row.get('id')}: {cluster.gpus} of {gpu} are on several nodes: give network_GBps, per GPU")
    if "optimizer" in row:
        stack = replace(stack, recipe=recipe_of(row["optimizer"]))
    return Training(model, cluster, stack, row["global_batch"]), layout


def recipe_of(text: str) -> Recipe:
    """Bytes per parameter from words such as `AdamW in bf16: 2+2+4`: weight, gradient, a master copy if any, state.

    Raises:
        ValueError: the words have no such sum.
    """
    said = re.search(r"\d+(\+\d+){2,3}", text)
    if not said:
        raise ValueError(
            f"the optimizer {text!r} needs its bytes per parameter: 2+2+4, or 2+4+4+8 with a master copy"
        )
    weight, gradient, *master, state = map(int, said[0].split("+"))
    return Recipe(weight, gradient, sum(master), state)


def gpu_of(row: Mapping) -> str:
    """The name in `GPUS` of the card of a row."""
    gpu = known(gpu_name(str(row["gpu"])), GPUS, "GPU")
    return CARD_OF.get((row.get("stack"), gpu), gpu)


def stack_of(row: Mapping) -> str:
    """The name of the stack of a row: of its publisher, or from what it says of its kernels."""
    publisher, default = row.get("stack"), "megatron" if row.get("flash") or row.get("fp8") else "megatron-2021"
    if publisher in RUN_FSDP or "compile" in row or int(row.get("zero", 0)) == 3:
        default = "fsdp" if row.get("compile", True) else "fsdp-eager"
    return STACK_OF.get(publisher, default)
