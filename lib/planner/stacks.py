"""What a GPU and its software reach: the fractions of data-sheet figures, and the bytes that are kept.

The constants of a stack were chosen by hand, among round numbers. One per GPU, the fraction of the peak that a large
matmul reaches, is calibrated on a published run (`CALIBRATED`). Chapter 14 tests all of them on the remaining runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from lib.cost.hardware import GPUS
from lib.cost.models import known
from lib.cost.sizes import RECIPES, Recipe


@dataclass(frozen=True)
class Stack:
    """The performance that a GPU and its software reach, as fractions of data-sheet figures.

    Args:
        matmul_share, attention_share: of the peak, by a large matmul, and by fused attention. The first is calibrated
            on one published run for each GPU.
        half_width: a matmul with so few rows, or columns on a rank, takes twice the time per operation.
        memory_share, link_share: of the memory bandwidth, by all operations except matmuls; of the link inside a node.
        network_share, message_share: of the network, by a collective over many GPUs, and by one message.
        exposed_tp, exposed_cp, exposed_pp, exposed_zero3: fraction that this software does not hide even behind long
            computation, of the tensor-parallel sums with sequence parallelism, of keys and values that are gathered, of
            the messages between the stages of an interleaved pipeline, and of the communication of ZeRO-3.
        overlaps_dp: whether gradients are reduced while the last microbatch runs backward, and parameters gathered
            while the first runs forward.
        regathers: whether column layers keep their shard of a sequence, and gather it again in backward.
        stops_early: whether recomputation of a block ends before its last matmul, whose result backward does not need.
        gathers_apart: whether each column layer gathers its input itself, five times in a Llama block instead of twice.
        reduced_bytes, copied_bytes: of ZeRO-3: bytes per gradient that is sent; moved in memory, per parameter and
            microbatch, to and from the messages.
        fp8_speedup: speed of the matmuls of a block over that in 16 bit (`lib.planner.fp8`).
        launch_s: in which the kernels of a block can be launched, forward and backward: no block is faster.
        balanced_cp: whether context-parallel ranks have equal shares of causal attention; otherwise the last rank, with
            the end of the sequence, has (2c-1)/c of them.
        cp_attention: `gather`, `ring` or `ulysses` over context-parallel ranks, unless a layout says (`attention`).
        keeps_gathered: whether keys and values that were gathered are kept for backward, and not gathered again.
        traffic: bytes moved by what is not a matmul, per byte of fused kernels; more with a kernel for each operation.
        fused_attention: whether the matrix of scores never goes to memory.
        fused_swiglu: whether backward computes silu(gate) again: 6f bytes per token of a gated MLP instead of 8f.
        recipe, logits_bytes: bytes kept per parameter; and per logit at the peak, as computed, in float32, their
            logarithms, and the gradient.
        whole_gradient_bytes: kept per parameter by a rank with ZeRO-2 or 3 while it sums several microbatches: it
            reduces the gradients of the last microbatch, and gradients are whole until then. 0: it reduces all of them.
        splits_vocabulary: whether tensor-parallel ranks have shares of the embedding and of the logits; otherwise each
            of them has the whole of both. The weight of the head is split in any case.
        spare_activations: bytes allocated per counted byte, with gaps of the allocator and temporary tensors; below 1
            where the software keeps less than the formula has.
        usable_share: of the memory of a GPU as it is sold, by all of this. An "80 GB" GPU has 86 GB: the driver, the
            collectives and the gaps of the allocator take about the difference.
        library: whose schedules and options a search proposes (`lib.planner.libraries`); it changes no prediction, and
            stacks that differ in nothing else are equal.
    """

    matmul_share: float
    attention_share: float
    half_width: float = 100
    memory_share: float = 0.7
    link_share: float = 0.95
    network_share: float = 0.9
    message_share: float = 0.6
    exposed_tp: float = 1.0
    exposed_cp: float = 1.0
    exposed_pp: float = 1.0
    exposed_zero3: float = 0.5
    overlaps_dp: bool = False
    regathers: bool = True
    stops_early: bool = False
    gathers_apart: bool = False
    reduced_bytes: int = 2
    copied_bytes: int = 0
    fp8_speedup: float = 1.0
    launch_s: float = 0.15e-3
    balanced_cp: bool = True
    cp_attention: str = "gather"
    keeps_gathered: bool = False
    traffic: float = 1.0
    fused_attention: bool = True
    fused_swiglu: bool = True
    recipe: Recipe = RECIPES["mixed Adam, fp32 gradients"]
    logits_bytes: int = 14
    spare_activations: float = 1.0
    usable_share: float = 1.0
    whole_gradient_bytes: int = 0
    splits_vocabulary: bool = True
    library: str = field(default="megatron-lm", compare=False)


CALIBRATED = {"a100": "Korthikanti 175B selective", "h100": "Llama 3 405B 8,192 GPUs"}  # rows, predicted exactly
# Of the peak: by matmuls, by fused attention. The H100 of 500 W is calibrated on torchtitan's compiled 8B.
SHARES = {"a100": (0.7597, 0.33), "h100": (0.6414, 0.50), "h100-500w": (0.5079, 0.50)}
SHARES["a100-40gb"] = SHARES["a100"]  # the same chip

BF16 = RECIPES["mixed Adam"]
# NVIDIA's recipes sum gradients in 16 bit; of a master copy TransformerEngine keeps the half that the weight lacks:
# NeMo, nemotron4_340b.py (commit 01d03c17) and scripts/performance/helpers.py (02a0e6a5).
NEMO = Recipe(2, 2, 2, 8)
# Attention over cp: Megatron-LM's `--cp-comm-type` is p2p, a ring that overlaps, unless it is all_gather, which cannot,
# or a2a (core/transformer/transformer_config.py, commit d98e8a64); PyTorch's `set_rotate_method` is allgather, and so
# is the default of torchtitan and Accelerate; Llama 3 gathers (section 3.3.2). Whether it keeps what it gathered is not
# said; Megatron-LM and PyTorch gather again (docs/source/api-guide/context_parallel.rst).
# Overlap and memory of the software; Narayanan et al. 2021 and Korthikanti et al. 2022 used megatron-2021; `megatron`
# is NVIDIA's recipes, `megatron-lm` its command line. `fsdp` is PyTorch of 2024: FlashAttention-2 reaches 35 % of an
# H100 (Shah et al. 2024, abstract; torch 2.11 0.41 to 0.54, `book/published/h100.json`), and with cp 4 or 8 it
# took as long as without balance (torchtitan's rows; the cause is a guess). `fsdp-eager` has a kernel for each
# operation of norms, rotations and SwiGLU; its 2 is chosen on one row.
STACKS = {
    "megatron-2021": {"fused_attention": False, "exposed_zero3": 1.0, "library": "megatron-2021"},
    "megatron": {"exposed_tp": 0.3, "cp_attention": "ring", "exposed_pp": 0.1, "overlaps_dp": True, "recipe": NEMO},
    # Without 0.8 none of its runs would fit.
    "llama3": {"overlaps_dp": True, "spare_activations": 0.8, "library": "llama3"},
    "aleph-alpha": {"recipe": BF16, "spare_activations": 1.3, "library": "aleph-alpha"},
    "fsdp": {
        "recipe": BF16,
        "overlaps_dp": True,
        "attention_share": 0.35,
        "balanced_cp": False,
        "regathers": False,
        "stops_early": True,
        "reduced_bytes": 4,
        "copied_bytes": 14,
        "library": "fully_shard",
    },
}
STACKS["megatron-lm"] = STACKS["megatron"] | {"recipe": RECIPES["mixed Adam, fp32 gradients"]}
# NeMo of March 2024: fused attention as FSDP's of that year, slower than what came after; calibrated on one row of 128
# thousand tokens, cp 4. The other eight, up to a million tokens and cp 32, say whether a ring hides.
STACKS["megatron-2024"] = STACKS["megatron"] | {"attention_share": 0.315}
CALIBRATED_ATTENTION = {"megatron-2024": "Long H100 Llama 2 7B, 128K"}  # a row of `book/published/long.json`
STACKS["torchtitan"] = STACKS["fsdp"] | {"library": "torchtitan"}
STACKS["fsdp-eager"] = STACKS["fsdp"] | {"traffic": 2.0, "fused_swiglu": False, "launch_s": 1.6e-3}
STACKS["fsdp1-eager"] = STACKS["fsdp-eager"] | {"reduced_bytes": 2, "copied_bytes": 0}
# KempnerForge (commit 5666d0d): parameters and both moments in 16 bit; `set_requires_gradient_sync(False)` until the
# last microbatch, with sums in float32 (training/grad.py, distributed/parallel.py); embedding and logits whole on each
# rank (distributed/tensor_parallel.py); a loss in 16 bit: logits, logarithms, gradients of both (training/loss.py).
STACKS["kempner-forge"] = STACKS["fsdp"] | {
    "gathers_apart": True,
    "attention_share": 0.5,
    "recipe": RECIPES["bf16 Adam"],
    "logits_bytes": 8,
    "whole_gradient_bytes": 4,
    "splits_vocabulary": False,
    "library": "kempner-forge",
}


def stack_for(name: str, gpu: str) -> Stack:
    """A stack on a GPU; a GPU without calibration gets the constants of the H100, whose kernels are the newest.

    Where its fastest published matmul is a smaller part of its peak than on the H100, they are as much smaller.
    """
    matmul, attention = SHARES.get(gpu) or (slower_than_h100(gpu) * share for share in SHARES["h100"])
    return replace(Stack(matmul, attention), **STACKS[known(name, STACKS, "stack")])


def stack_name(stack: Stack) -> str:
    """The name under which a stack is known on some GPU; empty if a setting is changed.

    Shares of the peak are of a GPU, unless a stack has its own share of attention.
    """
    plain = asdict(Stack(0, 0)) | {"recipe": Stack.recipe}
    mine = {name: getattr(stack, name) for name in plain if name != "matmul_share"}
    of_name = {name: plain | {"attention_share": stack.attention_share} | of for name, of in STACKS.items()}
    same = [name for name, of in of_name.items() if mine == {one: of[one] for one in mine}]
    return min(same, key=lambda name: "attention_share" not in STACKS[name], default="")


def slower_than_h100(gpu: str) -> float:
    """The part of its peak that the fastest published matmul of a GPU reaches, over the H100's; 1 if unknown, or more.

    The MI300X: 0.51 of its peak over 0.80, 0.64.
    """
    mine, h100 = GPUS.get(gpu), GPUS["h100"]
    if mine is None or mine.matmul_flops is None:
        return 1.0
    return min(1.0, mine.matmul_flops / mine.peak_flops / (h100.matmul_flops / h100.peak_flops))


def calibration_text(matmul_share: float) -> str:
    """The GPU on whose run a fraction of the peak was calibrated."""
    said = {f"h100, and {slower_than_h100(gpu):.2f} of it": slower_than_h100(gpu) * SHARES["h100"][0] for gpu in GPUS}
    said = {gpu: share for gpu, (share, _) in SHARES.items()} | said
    return next((words for words, share in said.items() if share == matmul_share), "no GPU")
