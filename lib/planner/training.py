"""The model to train, the cluster, the software and the layout; and those with a usual name.

The problem: a planner with forty inputs is too much work to use, and a planner with five hides its assumptions. The
idea: a model (`lib.cost.sizes`), a cluster, a layout; and a stack, which has all assumptions: the fractions of
data-sheet figures that a GPU reaches with its software.

The constants of a stack were chosen by hand, among round numbers. One per GPU, the fraction of the peak that a large
matmul reaches, is calibrated on a published run (`CALIBRATED`). Chapter 14 tests all of them on the remaining runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lib.cost.hardware import GPUS, Device
from lib.cost.models import PRESETS, known
from lib.cost.sizes import LLAMA, MODELS, RECIPES, ModelShape, Recipe, train_flops
from lib.layout import whole_number


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind (`lib.cost.hardware`), so many in all; those of a node, `per_node`, share the fast link."""

    device: Device
    gpus: int
    per_node: int = 8

    def bandwidth(self, stack: Stack, ranks: int, stride: int, share: float | None = None) -> float:
        """Bytes per second, one direction, of each rank of a group whose neighbours are `stride` ranks apart.

        Inside a node, the link. Across nodes, the network cards of the GPUs of the group on a node, in one direction,
        because its ring enters and leaves each node once; never more than the link. It reaches a `share` of the network
        bandwidth, by default that of collectives.
        """
        link = self.device.link_Bps * stack.link_share
        if ranks * stride <= self.per_node:
            return link
        on_a_node = max(1, min(ranks, self.per_node // stride))
        network = (self.device.network_Bps or 0) * (stack.network_share if share is None else share)
        return min(link, on_a_node * network)


@dataclass(frozen=True)
class Stack:
    """The performance that a GPU and its software reach, as fractions of data-sheet figures.

    Args:
        matmul_share, attention_share: of the peak, by a large matmul, and by fused attention. The first is calibrated
            on one published run for each GPU.
        half_width: a matmul with so few rows, or columns on a rank, takes twice the time per operation.
        memory_share, link_share: of the memory bandwidth, by all operations except matmuls; of the link inside a node,
            by a collective.
        network_share, message_share: of the network, by a collective over many GPUs, and by one message.
        exposed_tp, exposed_pp, exposed_zero3: fraction that computation does not hide, of the tensor-parallel sums, of
            the messages between the stages of an interleaved pipeline, and of the communication of ZeRO-3.
        overlaps_dp: whether gradients are reduced while the last microbatch runs backward.
        balanced_cp: whether context-parallel ranks have equal shares of causal attention; otherwise the last rank, with
            the end of the sequence, has (2c-1)/c of them.
        traffic: bytes moved by what is not a matmul, per byte of fused kernels; more with a kernel for each operation.
        fused_attention: whether the matrix of scores never goes to memory.
        fused_swiglu: whether backward computes silu(gate) again: 6f bytes per token of a gated MLP instead of 8f.
        recipe, logits_bytes: bytes kept per parameter; and per logit at the peak, as computed, in float32, their
            logarithms, and the gradient.
        spare_activations: bytes allocated per counted byte, with gaps of the allocator and temporary tensors; below 1
            where the software keeps less than the formula has.
        usable_share: of the memory of a GPU as it is sold, by all of this. An "80 GB" GPU has 86 GB: the driver, the
            collectives and the gaps of the allocator take about the difference.
    """

    matmul_share: float
    attention_share: float
    half_width: float = 120
    memory_share: float = 0.7
    link_share: float = 0.9
    network_share: float = 0.9
    message_share: float = 0.45
    exposed_tp: float = 1.0
    exposed_pp: float = 1.0
    exposed_zero3: float = 0.4
    overlaps_dp: bool = False
    balanced_cp: bool = True
    traffic: float = 1.0
    fused_attention: bool = True
    fused_swiglu: bool = True
    recipe: Recipe = RECIPES["mixed Adam, fp32 gradients"]
    logits_bytes: int = 14
    spare_activations: float = 1.0
    usable_share: float = 1.0


@dataclass(frozen=True, eq=False)  # compared by identity, so that caches find it quickly
class Training:
    """A training run whose layout is open: `model.context` is s, `global_batch` sequences of a step over all GPUs."""

    model: ModelShape
    cluster: Cluster
    stack: Stack
    global_batch: int

    def __post_init__(self) -> None:
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

    It may be impossible. A `lib.layout.Layout` is one that this library runs, and raises an error otherwise; it has no
    c, and counts microbatches where a planner counts their sequences.

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

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.dp * self.cp // self.replicas

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def microbatches(self, global_batch: int) -> float:
        """m of a step."""
        return global_batch / (self.dp * self.rows)


_NAMES = {"llama-7b": "7B", "llama-13b": "13B", "llama-70b": "70B", "gpt-175b": "175B", "llama-405b": "405B"}
PRESET_MODELS: dict[str, ModelShape] = {name: MODELS[short] for name, short in _NAMES.items()} | PRESETS

CALIBRATED = {"a100": "Korthikanti 175B selective", "h100": "Llama 3 405B 8,192 GPUs"}  # rows, predicted exactly
# Of the peak: by matmuls, by fused attention. The H100 of 500 W is calibrated on torchtitan's compiled 8B.
SHARES = {"a100": (0.7683, 0.33), "h100": (0.6498, 0.50), "h100-500w": (0.4832, 0.50)}

BF16 = RECIPES["mixed Adam"]
# NVIDIA's recipes sum gradients in 16 bit; of a master copy TransformerEngine keeps the half that the weight lacks:
# NeMo, nemotron4_340b.py (commit 01d03c17) and scripts/performance/helpers.py (02a0e6a5).
NEMO = Recipe(2, 2, 2, 8)
# Overlap and memory of the software; Narayanan et al. 2021 and Korthikanti et al. 2022 used megatron-2021; `megatron`
# is NVIDIA's recipes, `megatron-lm` its command line. `fsdp` is PyTorch of 2024: FlashAttention-2 reaches 35 % of an
# H100 (Shah et al. 2024, abstract; torch 2.11 0.41 to 0.54, `book/published/h100.json`), and its ring over 4 or 8 ranks
# took as long as without balance (torchtitan's rows; the cause is a guess). `fsdp-eager` has a kernel for each
# operation of norms, rotations and SwiGLU; its 2 is chosen on one row.
STACKS = {
    "megatron-2021": {"fused_attention": False, "exposed_zero3": 1.0},
    "megatron": {"exposed_tp": 0.3, "exposed_pp": 0.1, "overlaps_dp": True, "recipe": NEMO},
    "llama3": {"overlaps_dp": True, "spare_activations": 0.8},  # otherwise none of its runs would fit
    "aleph-alpha": {"recipe": BF16, "spare_activations": 1.3},
    "fsdp": {"recipe": BF16, "overlaps_dp": True, "attention_share": 0.35, "balanced_cp": False},
}
STACKS["megatron-lm"] = STACKS["megatron"] | {"recipe": RECIPES["mixed Adam, fp32 gradients"]}
STACKS["fsdp-eager"] = STACKS["fsdp"] | {"traffic": 2.0, "fused_swiglu": False}


def stack_for(name: str, gpu: str) -> Stack:
    """A stack on a GPU; a GPU without calibration gets the constants of the H100, whose kernels are the newest."""
    matmul, attention = SHARES.get(gpu, SHARES["h100"])
    return replace(Stack(matmul, attention), **STACKS[known(name, STACKS, "stack")])


# ---- a published run ------------------------------------------------------------------------------------------------

CARD_OF = {("titan", "h100"): "h100-500w"}  # torchtitan's have 96 GB and 500 W
SAME = {"selective (per operation)": "ops"}
STACK_OF = dict.fromkeys(("sc21", "korthikanti", "zb"), "megatron-2021") | {"aa": "aleph-alpha", "llama3": "llama3"}


def training_of(row: Mapping) -> tuple[Training, Layout4D]:
    """The training run of a row, and its layout; keys of a row as in `book/published/runs.json`."""
    gpu = known(str(row["gpu"]).lower().split()[0], GPUS, "GPU")
    gpu = CARD_OF.get((row.get("stack"), gpu), gpu)
    gated = bool(row.get("gated"))
    kind = LLAMA if gated else {"dropout_masks": not row.get("flash")}
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
    )
    cluster = Cluster(GPUS[gpu], row["gpus"], row.get("per_node", 8))
    return Training(model, cluster, stack_for(stack_of(row), gpu), row["global_batch"]), layout


def stack_of(row: Mapping) -> str:
    """The name of the stack of a row: of its publisher, or from what it says of its kernels."""
    default = "megatron" if row.get("flash") else "megatron-2021"
    if int(row.get("zero", 0)) == 3:
        default = "fsdp" if row.get("compile", True) else "fsdp-eager"
    return STACK_OF.get(row.get("stack"), default)
