"""The techniques of the book, one by one: what each cuts, keeps and sends, when, and how frameworks call it.

Words and formulas are here; the sheet to print and a table of chapter 13 are made of them. Each quantity is a `Term`:
its formula, and the function of `lib.cost` that must give the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from book.terms import (
    ON_DATA,
    ON_MODEL,
    Term,
    activations,
    block_flops,
    context_sends,
    expert_sends,
    expert_shape_of,
    pipeline_sends,
    shape_of,
    states,
    tensor_sends,
    zero_sends,
)
from lib.cost.bubble import bubble


@dataclass(frozen=True)
class Technique:
    """What the sheet says of a technique.

    Args:
        icon: of the cut: the number of a chapter, or the stage of ZeRO as a negative number.
        chapters: that measure it.
        cut: what is divided.
        names: framework → how it is asked for there; "" if the framework does not have it.
        bubble: the fraction of a step that ranks idle; None if no rank idles by plan.
    """

    name: str
    icon: int
    chapters: str
    cut: str
    memory: tuple[Term | str, ...]
    sends: tuple[Term | str, ...]
    when: str
    use: str
    names: Mapping[str, str]
    bubble: Term | None = None


PYTORCH, MEGATRON, DEEPSPEED = FRAMEWORKS = ("PyTorch", "Megatron-LM", "DeepSpeed")


def names_of(pytorch: str, megatron: str, deepspeed: str) -> dict[str, str]:
    return dict(zip(FRAMEWORKS, (pytorch, megatron, deepspeed), strict=True))


def _stage(zero: int) -> str:
    return f'"zero_optimization": {{"stage":\u00a0{zero}}}'


KEPT = "l · bs(16h + 6f)"  # bytes of activations of a microbatch, in all layers of one rank

DATA = (
    Technique(
        "Data parallelism",
        3,
        "3",
        "Cuts the batch. Each rank holds the model, and computes 1/d of the sequences.",
        (
            Term("States, all on each rank:", "16Ψ", states, ON_DATA),
            Term("Activations of a microbatch:", KEPT, activations, ON_DATA),
        ),
        (Term("An all-reduce of the gradients:", "2(d−1)/d · 2Ψ", zero_sends(0), ON_DATA),),
        "Once a step, bucket by bucket, while backward computes the layers before. Only the last bucket cannot hide.",
        "Begin here, if the model fits on one GPU.",
        names_of("DistributedDataParallel", "the default; --overlap-grad-reduce", _stage(0)),
    ),
    Technique(
        "ZeRO-1",
        -1,
        "4",
        "Cuts the optimizer states as well. A rank updates 1/d of the parameters.",
        (Term("States:", "4Ψ + 12Ψ/d", lambda e: states(e, 1, dp=e["d"]), ON_DATA), "Activations as before."),
        (
            Term(
                "Reduce-scatter gradients, all-gather parameters: as before,",
                "2(d−1)/d · 2Ψ",
                zero_sends(1),
                ON_DATA,
            ),
        ),
        "Gradients during the last backward; parameters after the optimizer, or in the next forward.",
        "Always: less memory, and no byte more. The stage that goes with a pipeline.",
        names_of("ZeroRedundancyOptimizer", "--use-distributed-optimizer", _stage(1)),
    ),
    Technique(
        "ZeRO-2",
        -2,
        "4",
        "Cuts the gradients as well. A rank keeps the sums of its 1/d.",
        (Term("States:", "2Ψ + 14Ψ/d", lambda e: states(e, 2, dp=e["d"]), ON_DATA), "Activations as before."),
        (
            Term(
                "A reduce-scatter for each microbatch, one all-gather:",
                "(m+1)(d−1)/d · 2Ψ",
                zero_sends(2),
                ON_DATA,
            ),
        ),
        "Gradients during each backward; parameters as in ZeRO-1.",
        "If a step is one microbatch, and sends no more than under ZeRO-1.",
        names_of(
            "nearly: fully_shard(block, reshard_after_forward=False)",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            _stage(2),
        ),
    ),
    Technique(
        "ZeRO-3 (FSDP)",
        -3,
        "5",
        "Cuts the parameters as well. A block is gathered to compute, then freed.",
        (
            Term("States:", "16Ψ/d", lambda e: states(e, 3, dp=e["d"]), ON_DATA),
            Term("and a gathered block:", "2(4h² + 3hf)", lambda e: 2 * shape_of(e).num_block_weights, ON_DATA),
        ),
        (
            Term(
                "Two all-gathers and a reduce-scatter for each microbatch:", "3m(d−1)/d · 2Ψ", zero_sends(3), ON_DATA
            ),
        ),
        "Before each block, forward and backward, prefetched while the block before computes; gradients after it.",
        "If states do not fit otherwise, and a microbatch is long enough to hide gathers.",
        names_of(
            "fully_shard(block)",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            _stage(3),
        ),
    ),
    Technique(
        "Recomputation",
        1,
        "1 and 7",
        "Cuts nothing: it pays with time. A block keeps its input, and computes the rest again.",
        (
            Term("Activations of a microbatch:", "2l · bsh", lambda e: activations(e, recompute="full"), ON_DATA),
            "and one block while it is computed again.",
        ),
        (
            "No byte more, except with tensor parallelism: its sums of forward run again.",
            Term(
                "Operations of the blocks:",
                "4/3",
                lambda e: block_flops(e, "full") / block_flops(e, "none"),
                ON_DATA,
                "×",
            ),
        ),
        "A block's forward runs again just before its backward.",
        "If activations are what does not fit, even with a fused attention.",
        names_of(
            "torch.utils.checkpoint.checkpoint",
            "--recompute-granularity full --recompute-method uniform",
            "checkpoint of deepspeed.checkpointing",
        ),
    ),
)

MODEL = (
    Technique(
        "Tensor parallelism",
        6,
        "6",
        "Cuts every matrix: the first of a pair by columns or heads, the second by rows.",
        (
            Term("States:", "16Ψ/t", lambda e: states(e, tp=e["t"]), ON_MODEL),
            Term(
                "Activations of a microbatch:",
                "l · bs(8h + (8h + 6f)/t)",
                lambda e: activations(e, tp=e["t"]),
                ON_MODEL,
            ),
        ),
        (
            Term(
                "Four all-reduces of an activation per block and microbatch:",
                "8(t−1)/t · 2bsh · l · m",
                tensor_sends(False),
                ON_MODEL,
            ),
        ),
        "After each pair of matrices. In forward ranks wait; in backward weight gradients can hide it.",
        "Inside a node, if the batch is too small for more copies, or a layer too wide.",
        names_of(
            "parallelize_module: ColwiseParallel, RowwiseParallel",
            "--tensor-model-parallel-size 8",
            '"tensor_parallel": {"autotp_size": 8}',
        ),
    ),
    Technique(
        "Sequence parallelism",
        7,
        "7",
        "Cuts the tokens as well, between the matrices: norms, dropout, residuals.",
        (
            "States as before.",
            Term(
                "Activations of a microbatch:",
                "l · bs(16h + 6f)/t",
                lambda e: activations(e, tp=e["t"], sequence_parallel=True),
                ON_MODEL,
            ),
        ),
        (
            Term(
                "All-gathers and reduce-scatters in their place, and x gathered again in backward:",
                "10(t−1)/t · 2bsh · l · m",
                tensor_sends(True),
                ON_MODEL,
            ),
        ),
        "Around each pair of matrices. Pieces can hide next to matmuls, and the second gather of x.",
        "Whenever there is tensor parallelism.",
        names_of("SequenceParallel", "--sequence-parallel", ""),
    ),
    Technique(
        "Pipeline parallelism",
        9,
        "8 to 12",
        "Cuts the layers. A rank has l/p of them, its stage; microbatches pass through.",
        (
            Term("States:", "16Ψ/p", lambda e: states(e, pp=e["p"]), ON_MODEL),
            "Activations: by schedule.",
        ),
        (
            Term(
                "An activation to the next stage, its gradient back, for each microbatch:",
                "2m · 2bsh",
                pipeline_sends(lambda e: 1),
                ON_MODEL,
            ),
        ),
        "After each forward and backward of a stage; hidden while other microbatches compute.",
        "Over slow links, with many microbatches, and with ZeRO-1 at most.",
        names_of(
            "PipelineStage, and a schedule",
            "--pipeline-model-parallel-size 8",
            "PipelineModule(layers, num_stages=8)",
        ),
        Term("Bubble of 1F1B:", "(p−1)/(m+p−1)", lambda e: bubble(e["p"], e["m"]), ON_MODEL, "%"),
    ),
)
CONTEXT = Technique(
    "Context parallelism",
    17,
    "17",
    "Cuts the sequence everywhere, in attention and MLP as well. No weight is cut.",
    (
        Term("States:", "16Ψ", states, ON_MODEL),
        Term("Activations of a microbatch:", f"{KEPT}/c", lambda e: activations(e) / e["c"], ON_MODEL),
    ),
    (
        Term(
            "Keys and values around a ring, three times per block and microbatch:",
            "3(c−1)/c · 4bsh · l · m",
            context_sends,
            ON_MODEL,
        ),
    ),
    "While attention computes with the keys and values that came before.",
    "If a sequence is too long for a group that cannot grow.",
    names_of("torch.distributed.tensor.experimental.context_parallel", "--context-parallel-size 8", ""),
)
EXPERTS = Technique(
    "Expert parallelism",
    18,
    "18",
    "Cuts the experts of a block. Data-parallel ranks hold E/e of them each.",
    (
        Term(
            "States of experts:",
            "16E · 3hfl/e",
            lambda e: 16 * expert_shape_of(e).routed_parameters(range(e["l"])) / e["e"],
            ON_DATA,
        ),
        "The rank of the hottest expert keeps more.",
    ),
    (
        Term(
            "Copies of tokens to their experts and home, forward and backward:",
            "4k(e−1)/e · 2bsh · l · m",
            expert_sends,
            ON_DATA,
        ),
    ),
    "Before and after the experts of a block. All wait for the rank with most copies.",
    "If a model has experts, and they do not fit on each rank.",
    names_of("", "--expert-model-parallel-size 8", "MoE(hidden_size, expert, ep_size=8)"),
)
AXES = (*(one for one in (*DATA, *MODEL[:-1]) if one.name != "Recomputation"), CONTEXT, EXPERTS, MODEL[-1])
