"""Train the GPT, in one process or in many: `python -m lib.train --dp 2 --zero 1`.

The loop is the one of the book: rows of this rank, forward, backward, finish, clip, step. It is the same for each stage
of ZeRO, for matrices in parts and for a pipeline. It runs in three ways, which is nobody's business but this file's:
alone, through `run` on this machine, or under `torchrun`. The same seed gives the same losses in each, to rounding:
that is what layouts are compared with (`--report`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lib import comm, data, trace
from lib.data_parallel.ddp import BucketedDDP, global_mean
from lib.data_parallel.flat import MakeOptimizer
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.launch import MAX_RANKS, RunError, close, device, init, run
from lib.memory import MemoryTracker
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig, loss_sum_and_count, mean_loss
from lib.pipeline.gpt import PipelineGPT
from lib.tensor_parallel.gpt import TensorParallelGPT
from lib.train_config import COMPUTE_DTYPES, DTYPES, SCHEDULES, STAGES, TrainConfig

BAR = "{percentage:3.0f}% {bar:16} step {n_fmt}/{total_fmt}{postfix}, {remaining} left"  # "rank 0 | " comes before


class DDP(BucketedDDP):
    """`BucketedDDP` that steps its optimizer itself, as the stages of ZeRO do."""

    def __init__(self, module: nn.Module, group: Group, optimizer: MakeOptimizer, op: str, bucket_bytes: int) -> None:
        super().__init__(module, group, op, bucket_bytes)
        self.optimizer = optimizer(list(module.named_parameters()))

    def step(self) -> None:
        """Step the optimizer; the gradients are used up."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class InParts(DDP):
    """The same around a model in parts, matrices or stages, of which each data-parallel group has one."""

    module: TensorParallelGPT | PipelineGPT

    def finish(self) -> None:
        super().finish()
        self.module.finish()

    def clip_gradients(self, max_norm: float) -> Tensor:
        return self.module.clip_gradients(max_norm)


WRAPPERS = dict(zip(STAGES, (DDP, ZeRO1, ZeRO2, FSDP), strict=True))


def train(world: Group, config: TrainConfig, quiet: bool = False) -> dict:
    """Train on all ranks of `world`, and return this rank's report.

    Returns:
        `losses`: mean loss of each step in nats per token, over all ranks, before the step. `validation`: pairs
        (step, loss). `traffic`: "kind axis" → calls and wire bytes that this rank sent in all steps. `peak_bytes`:
        the highest of each kind and of the total in one step, which need not be at the same moment. `step_s`: seconds
        of each step; the second one is slow, as its memory is watched.
    """
    mesh = Mesh(MeshShape(dp=config.dp, pp=config.pp, tp=config.tp), world)
    group = mesh.group("dp")
    torch.manual_seed(config.seed)
    module = GPT(config.model).to(device(), DTYPES[config.dtype])
    if config.tp > 1:
        module = TensorParallelGPT(module, mesh.group("tp"), config.sequence_parallel)
    elif config.pp > 1:
        module = PipelineGPT(module, config.make_schedule(), mesh.group("pp"))
    model = wrap(module, group, config)
    # From here on randomness is for dropout: other rows or layers, other masks.
    torch.manual_seed(config.seed + world.rank // config.tp)
    corpus = data.load()
    report: dict = {"losses": [], "validation": [], "step_s": [], "peak_bytes": {}}
    traffic: dict = {}
    silent = quiet or world.rank > 0
    with tqdm(range(config.steps), bar_format=BAR, disable=silent, file=sys.stdout) as bar:
        for step in bar:
            if config.validate_every and step % config.validate_every == 0:
                report["validation"].append((step, validate(model, corpus.validation, config, group)))
            began_s = time.perf_counter()
            watches_memory = step == min(1, config.steps - 1)  # the first step in which everything is there
            with ExitStack() as stack:
                recorded = stack.enter_context(trace.record(world.rank))
                watch = MemoryTracker(model, model.optimizer) if watches_memory else nullcontext()
                memory = stack.enter_context(watch)
                if memory is not None and isinstance(model, DDP):  # its buckets live on when no p.grad shows them
                    memory.count_as("gradient", *(bucket.flat for bucket in model.buckets))
                loss = train_step(model, corpus.train, step, config, group)
            report["step_s"].append(time.perf_counter() - began_s)
            report["losses"].append(loss)
            for (kind, axis), (calls, sent) in recorded.traffic().items():
                before = traffic.get(f"{kind} {axis}", (0, 0.0))
                traffic[f"{kind} {axis}"] = (before[0] + calls, before[1] + sent)
            if memory is not None:
                report["peak_bytes"] = memory.peak_by_kind
            tokens_per_s = config.tokens_per_step() / report["step_s"][-1]
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
    if config.validate_every:
        report["validation"].append((config.steps, validate(model, corpus.validation, config, group)))
    return report | {"traffic": traffic, "config": asdict(config)}


def wrap(module: GPT | TensorParallelGPT | PipelineGPT, group: Group, config: TrainConfig) -> DDP | ZeRO1:
    """The model on its data-parallel ranks, with an optimizer, in the stage of `config`."""
    more: dict = {"bucket_bytes": config.bucket_bytes} if config.zero < 3 else {}
    if config.compute_dtype:
        more["dtype"] = COMPUTE_DTYPES[config.compute_dtype]
    wrapper = WRAPPERS[config.zero] if isinstance(module, GPT) else InParts
    return wrapper(module, group, partial(torch.optim.AdamW, lr=config.lr), op="sum", **more)


def train_step(model: DDP | ZeRO1, tokens: Tensor, step: int, config: TrainConfig, group: Group) -> float:
    """One step on this rank's rows; the mean loss over all ranks, before the weights move."""
    inputs, targets = data.batch(
        tokens, step, global_batch=config.global_batch, context=config.model.context, seed=config.seed
    )
    mine, here = data.rows_of_rank(config.global_batch, group.rank, group.size), device()
    forward_backward = _scheduled if config.pp > 1 else _one_by_one
    loss = forward_backward(model, inputs[mine].to(here), targets[mine].to(here), config, group)
    model.finish()
    with trace.span("optimizer"):
        model.clip_gradients(config.max_norm)
        model.step()
    return comm.all_reduce(loss, group).item()


def _one_by_one(model: DDP | ZeRO1, inputs: Tensor, targets: Tensor, config: TrainConfig, group: Group) -> Tensor:
    """Forward and backward of each microbatch; this rank's part of the mean loss."""
    k = config.microbatches
    total = torch.zeros((), dtype=DTYPES[config.dtype], device=inputs.device)
    for i, (x, y) in enumerate(zip(inputs.chunk(k), targets.chunk(k), strict=True)):
        adds_up = i < k - 1 and config.zero < 2
        with model.no_sync() if adds_up else nullcontext():
            with trace.span("forward"):
                loss_sum, count = _loss_of(model)(model(x), y)
                loss = loss_sum / (count * k * group.size)  # rows are even: the count is known
            with trace.span("backward"):
                loss.backward()
        total += loss.detach()
    return total


def _scheduled(model: InParts, inputs: Tensor, targets: Tensor, config: TrainConfig, group: Group) -> Tensor:
    """The same in the order of the pipeline's schedule; on each of its ranks."""
    with model.no_sync():  # only the schedule knows which backward of a stage is its last: finish() sends all
        return model.module.forward_backward(inputs, targets, lambda y, t: mean_loss(y, t) / group.size)


def _loss_of(model: DDP | ZeRO1) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return getattr(model.module, "loss_sum_and_count", loss_sum_and_count)


@torch.no_grad()
def validate(model: nn.Module, tokens: Tensor, config: TrainConfig, group: Group, limit: int = 64) -> float:
    """Mean loss on `limit` sequences of the validation text, each rank its share.

    Each rank calls forward once, also one that has no rows: in stage 3 a forward is a collective.
    """
    inputs, targets = data.windows(tokens, config.model.context, limit)
    mine, here = slice(group.rank, None, group.size), device()
    x, y = inputs[mine].to(here), targets[mine].to(here)
    loss_sum, count = model.module.evaluate(x, y) if config.pp > 1 else _loss_of(model)(model(x), y)
    part = global_mean(loss_sum, count, group)
    return comm.all_reduce(part, group).item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lib.train", description="Train a small GPT on Python's help.")
    sizes = GPTConfig()
    parser.add_argument("--dp", type=int, default=None, help="data-parallel ranks (under torchrun: all of them)")
    parser.add_argument("--pp", type=int, default=1, help="ranks of a pipeline: each has some of the layers")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="of a pipeline")
    parser.add_argument(
        "--stages-per-rank", type=int, default=1, help="of a pipeline: 2 or more with interleaved, 2 with zb-v"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks: each has a part of every matrix")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="with --tp: slices of the sequence between parallel layers"
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=STAGES,
        default=0,
        help="what ranks share out: 0 nothing, 1 the optimizer's state, 2 gradients as well, 3 parameters, too (FSDP)",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument(
        "--microbatches",
        type=int,
        default=1,
        help="pieces of a rank's rows, gradients added up; --zero 2 and 3 send those of each piece: more bytes, "
        "less memory; with --pp, what passes through the pipeline",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of the weights")
    parser.add_argument(
        "--compute-dtype",
        choices=list(COMPUTE_DTYPES),
        help="to compute and communicate in, with master weights in --dtype; needs --zero 1, 2 or 3",
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--validate-every", type=int, default=50, help="0: never")
    parser.add_argument("--d-model", type=int, default=sizes.d_model)
    parser.add_argument("--layers", type=int, default=sizes.num_layers)
    parser.add_argument("--heads", type=int, default=sizes.num_heads)
    parser.add_argument("--context", type=int, default=sizes.context)
    parser.add_argument("--report", metavar="FILE.json", help="write losses, traffic, memory and times of all ranks")
    args = parser.parse_args(argv)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 0))  # of torchrun, or 0 and 0
    try:
        config = TrainConfig(
            model=GPTConfig(context=args.context, d_model=args.d_model, num_layers=args.layers, num_heads=args.heads),
            dp=max(1, size // max(1, args.pp * args.tp)) if args.dp is None else args.dp,
            pp=args.pp,
            schedule=args.schedule,
            stages_per_rank=args.stages_per_rank,
            tp=args.tp,
            sequence_parallel=args.sequence_parallel,
            zero=args.zero,
            steps=args.steps,
            global_batch=args.global_batch,
            microbatches=args.microbatches,
            lr=args.lr,
            seed=args.seed,
            dtype=args.dtype,
            compute_dtype=args.compute_dtype,
            validate_every=args.validate_every,
        )
        ranks = config.dp * config.pp * config.tp
        layout = f"--dp {config.dp}"
        layout += "".join(f" --{axis} {n}" for axis, n in (("pp", config.pp), ("tp", config.tp)) if n > 1)
        if size and ranks != size:
            raise ValueError(f"{layout} needs {ranks} ranks, but torchrun started {size}")
        if not size and ranks > MAX_RANKS:
            raise ValueError(f"{layout} is more than {MAX_RANKS} ranks on one machine; use torchrun on several")
        if args.report and rank == 0:
            _check_writable(args.report)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n" if rank == 0 else None)
    try:
        if size or ranks == 1:
            world = init()
            reports = close(world, train(world, config))
        else:
            reports = list(run(train, ranks, config, timeout_s=30 * 24 * 3600))
    except RunError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted\n" if rank == 0 else None)
    if rank == 0:
        print(_summary(config, reports[0]))
        if args.report:
            with open(args.report, "w", encoding="utf-8") as file:
                json.dump({"losses": reports[0]["losses"], "ranks": reports}, file)


def _check_writable(path: str) -> None:
    """Fail now rather than after hours of training."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"--report {path} cannot be written: give a file name in a folder that exists")


def _summary(config: TrainConfig, report: dict) -> str:
    sent = sum(sent for _, sent in report["traffic"].values())
    first, last = report["losses"][0], report["losses"][-1]
    lines = [f"loss: {first:.3f} nats per byte in the first step, {last:.3f} in step {config.steps}"]
    if report["validation"]:
        floor = data.unigram_entropy(data.load().validation)
        lines.append(f"validation: {report['validation'][-1][1]:.3f} (byte frequencies alone give {floor:.3f})")
    held = report["peak_bytes"]["total"]
    lines.append(f"rank 0 sent {sent / 1e6:.1f} MB and held at most {held / 1e6:.1f} MB of tensors")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
