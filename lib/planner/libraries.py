"""Schedules and options of training libraries: a search proposes to a reader only layouts that the library can run.

The problem: ZB-V is no advice for a run of Megatron-LM, which does not have it, and a pipeline is none for a script
that calls `fully_shard`. The idea: a table with a source for each library; a `Stack` names its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """Choices of a search that a training library has. Each has ZeRO 0, 1 and 3, and tensor parallelism.

    Args:
        name: for sentences.
        schedules: of a pipeline: `1f1b`, `interleaved`, `zb-h1`, `zb-v`; without any it has no pipeline.
        recompute, every: kinds of recomputation, and of how many blocks one is recomputed in full.
        loss_chunks: pieces of the loss.
        context_parallel: whether attention runs on a sequence that is split.
        hybrid: whether ZeRO-3 may be with tp, or over the GPUs of a node only (HSDP).
    """

    name: str
    schedules: tuple[str, ...] = ("1f1b",)
    recompute: tuple[str, ...] = ("none", "full")
    every: tuple[int, ...] = (1,)
    loss_chunks: tuple[int, ...] = (1,)
    context_parallel: bool = False
    hybrid: bool = False


LIBRARIES = {
    # v3.0 of 2022: megatron/schedules.py; arguments.py has `--recompute-granularity` and `--recompute-num-layers`.
    "megatron-2021": Library("Megatron-LM v3.0", ("1f1b", "interleaved"), ("none", "selective", "full"), (1, 2)),
    # NVIDIA/Megatron-LM, core/pipeline_parallel/schedules.py, `get_forward_backward_func` (commit 00611e6e): with
    # interleaving or without, and no deferred weight gradients; training/arguments.py (000c4ac): `--recompute-modules`
    # has core_attn and mlp, `--recompute-method block` some blocks of a stage; `--context-parallel-size`.
    "megatron-lm": Library(
        "Megatron-LM", ("1f1b", "interleaved"), ("none", "selective", "mlp", "full"), (1, 2), context_parallel=True
    ),
    # Grattafiori et al. 2024, sections 3.3.2 and 3.3.3: interleaved 1F1B, and an all-gather of keys and values.
    "llama3": Library("Llama 3's library", ("1f1b", "interleaved"), context_parallel=True),
    # Hagemann et al. 2023: its tables (`book/published/layouts_a100.json`) have no stages per rank, and checkpoints of
    # every layer or of none.
    "aleph-alpha": Library("Aleph Alpha's library"),
    # huggingface/accelerate, src/accelerate/parallelism_config.py (commit 0422db7e): axes dp_replicate, dp_shard, cp
    # and tp, and no pipeline; `fsdp_activation_checkpointing` is all or nothing. ZeRO-1 is `set_requires_gradient_sync`
    # and `set_reshard_after_backward` of PyTorch's FSDPModule.
    "fully_shard": Library("fully_shard", (), context_parallel=True, hybrid=True),
    # pytorch/torchtitan, distributed/pipeline_parallel.py (commit 02ef790c), with the schedules of
    # torch.distributed.pipelining: 1F1B, interleaved, ZB-V; its checkpoints are by operation, or of every n-th block
    # (`selective_ac_option`), and its loss is in pieces (`loss.num_chunks`; commit 9810191).
    "torchtitan": Library(
        "torchtitan",
        ("1f1b", "interleaved", "zb-v"),
        ("none", "ops", "full"),
        (1, 2),
        (1, 8),
        context_parallel=True,
        hybrid=True,
    ),
    # deepspeedai/DeepSpeed, runtime/pipe/schedule.py (commit 83fd8f87): `TrainSchedule` is 1F1B;
    # its DualPipeV is not planned.
    "deepspeed": Library("DeepSpeed"),
    # KempnerInstitute/KempnerForge, kempnerforge/distributed/pipeline_parallel.py (commit 01b461a7): 1F1B, and a rank
    # builds one stage.
    "kempner-forge": Library("KempnerForge", hybrid=True),
    # huggingface/nanotron, parallel/pipeline_parallel/engine.py (commit 1cc9cb31): all forward, or 1F1B.
    "nanotron": Library("nanotron", context_parallel=True),
}
