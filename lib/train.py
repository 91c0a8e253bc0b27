"""Train the GPT, in one process or in many: `python -m lib.train --dp 2`.

The loop is the one of the book: rows of this rank, forward, backward, finish, clip, step. It runs in three ways, and
which one is nobody's business but this file's: alone, through `run` on this machine, or under `torchrun`. The same seed
gives the same losses in each, to rounding: that is what layouts are compared with (`--report`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from lib import comm, data, trace
from lib.data_parallel.ddp import BucketedDDP, DataParallel, global_mean
from lib.launch import RunError, close, device, init, run
from lib.memory import MemoryTracker
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig, loss_sum_and_count

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Args:
        model: sizes of the GPT.
        dp: data-parallel ranks.
        steps: optimizer steps.
        global_batch: sequences a step, over all ranks.
        microbatches: pieces in which a rank works through its rows, adding up gradients.
        lr, max_norm: of AdamW, and of gradient clipping.
        seed: of the weights and the data, the same whatever the layout.
        dtype: `float32` or `float64`.
        validate_every: steps between two measurements of the validation loss; 0 is never.
        bucket_bytes: of `BucketedDDP`.

    Raises:
        ValueError: a number that makes no sense, or a batch that cannot be split over the ranks and microbatches.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    dp: int = 1
    steps: int = 100
    global_batch: int = 16
    microbatches: int = 1
    lr: float = 3e-3
    max_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    validate_every: int = 0
    bucket_bytes: int = 4 * 2**20

    def __post_init__(self) -> None:
        MeshShape(dp=self.dp)
        for name in ("steps", "global_batch", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        pieces = self.dp * self.microbatches
        if self.global_batch % pieces:
            each = f"dp={self.dp}" + (f" x microbatches={self.microbatches}" if self.microbatches > 1 else "")
            raise ValueError(
                f"global_batch={self.global_batch} cannot be split over {each}; use a multiple of {pieces}"
            )

    def tokens_per_step(self) -> int:
        return self.global_batch * self.model.context


def train(world: Group, config: TrainConfig, quiet: bool = False) -> dict:
    """Train on all ranks of `world`, and return this rank's report.

    Returns:
        `losses`: mean loss of each step in nats per token, over all ranks, before the step. `validation`: pairs
        (step, loss). `traffic`: "kind axis" → calls and wire bytes that this rank sent. `peak_bytes`: by kind, in one
        step. `step_s`: seconds of each step.
    """
    group = Mesh(MeshShape(dp=config.dp), world).group("dp")
    torch.manual_seed(config.seed)
    model = BucketedDDP(
        GPT(config.model).to(device(), DTYPES[config.dtype]), group, op="sum", bucket_bytes=config.bucket_bytes
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    corpus = data.load()
    report: dict = {"losses": [], "validation": [], "step_s": [], "peak_bytes": {}}
    traffic: dict = {}
    with tqdm(range(config.steps), unit="step", disable=quiet or world.rank > 0, file=sys.stdout) as bar:
        for step in bar:
            if config.validate_every and step % config.validate_every == 0:
                report["validation"].append((step, validate(model, corpus.validation, config, group)))
            began_s = time.perf_counter()
            watches_memory = step == min(1, config.steps - 1)  # the first step in which everything is there
            with ExitStack() as stack:
                recorded = stack.enter_context(trace.record(world.rank))
                memory = stack.enter_context(MemoryTracker(model, optimizer) if watches_memory else nullcontext())
                loss = train_step(model, optimizer, corpus.train, step, config, group)
            report["step_s"].append(time.perf_counter() - began_s)
            report["losses"].append(loss)
            for (kind, axis), (calls, sent) in recorded.traffic().items():
                before = traffic.get(f"{kind} {axis}", (0, 0.0))
                traffic[f"{kind} {axis}"] = (before[0] + calls, before[1] + sent)
            if memory is not None:
                report["peak_bytes"] = memory.peak
            bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{config.tokens_per_step() / report['step_s'][-1]:.0f}")
    if config.validate_every:
        report["validation"].append((config.steps, validate(model, corpus.validation, config, group)))
    return report | {"traffic": traffic, "config": asdict(config)}


def train_step(
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    step: int,
    config: TrainConfig,
    group: Group,
) -> float:
    """One step on this rank's rows; the mean loss over all ranks, before the weights move."""
    inputs, targets = data.batch(
        tokens, step, global_batch=config.global_batch, context=config.model.context, seed=config.seed
    )
    mine = data.rows_of_rank(config.global_batch, group.rank, group.size)
    here, k = device(), config.microbatches
    pieces = zip(inputs[mine].to(here).chunk(k), targets[mine].to(here).chunk(k), strict=True)
    optimizer.zero_grad()
    total = torch.zeros((), dtype=DTYPES[config.dtype], device=here)
    for i, (x, y) in enumerate(pieces):
        last = i == k - 1
        with nullcontext() if last else model.no_sync():
            with trace.span("forward"):
                loss_sum, count = loss_sum_and_count(model(x), y)
                loss = loss_sum / (count * k * group.size)  # rows are even: the count is known
            with trace.span("backward"):
                loss.backward()
        total += loss.detach()
    model.finish()
    with trace.span("optimizer"):
        model.clip_gradients(config.max_norm)
        optimizer.step()
    return comm.all_reduce(total, group).item()


@torch.no_grad()
def validate(model: torch.nn.Module, tokens: Tensor, config: TrainConfig, group: Group, limit: int = 64) -> float:
    """Mean loss on `limit` sequences of the validation text, each rank its share."""
    inputs, targets = data.windows(tokens, config.model.context, limit)
    mine, here = slice(group.rank, None, group.size), device()
    loss_sum, count = loss_sum_and_count(model(inputs[mine].to(here)), targets[mine].to(here))
    part = global_mean(loss_sum, count, group)
    return comm.all_reduce(part, group).item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lib.train", description="Train a small GPT on Python's help."
    )
    sizes = GPTConfig()
    parser.add_argument("--dp", type=int, default=None, help="data-parallel ranks (under torchrun: all of them)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--microbatches", type=int, default=1, help="pieces of a rank's rows, gradients added up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--validate-every", type=int, default=50, help="0: never")
    parser.add_argument("--d-model", type=int, default=sizes.d_model)
    parser.add_argument("--layers", type=int, default=sizes.num_layers)
    parser.add_argument("--heads", type=int, default=sizes.num_heads)
    parser.add_argument("--context", type=int, default=sizes.context)
    parser.add_argument("--report", metavar="FILE.json", help="write losses, traffic, memory and times of all ranks")
    args = parser.parse_args(argv)
    under_torchrun = "RANK" in os.environ
    dp = args.dp or (int(os.environ["WORLD_SIZE"]) if under_torchrun else 1)
    try:
        config = TrainConfig(
            model=GPTConfig(context=args.context, d_model=args.d_model, num_layers=args.layers, num_heads=args.heads),
            dp=dp,
            steps=args.steps,
            global_batch=args.global_batch,
            microbatches=args.microbatches,
            lr=args.lr,
            seed=args.seed,
            dtype=args.dtype,
            validate_every=args.validate_every,
        )
        if under_torchrun or dp == 1:
            world = init()
            reports = close(world, train(world, config))
        else:
            world, reports = Group(), list(run(train, dp, config, timeout_s=24 * 3600))
    except (ValueError, RunError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if world.rank == 0:
        print(_summary(config, reports[0]))
        if args.report:
            with open(args.report, "w", encoding="utf-8") as file:
                json.dump({"losses": reports[0]["losses"], "ranks": reports}, file)


def _summary(config: TrainConfig, report: dict) -> str:
    sent = sum(sent for _, sent in report["traffic"].values())
    lines = [f"loss {report['losses'][0]:.3f} → {report['losses'][-1]:.3f} nats per byte, {config.steps} steps"]
    if report["validation"]:
        floor = data.unigram_entropy(data.load().validation)
        lines.append(f"validation {report['validation'][-1][1]:.3f} (byte frequencies alone: {floor:.3f})")
    lines.append(f"each rank sent {sent / 1e6:.1f} MB and held at most {report['peak_bytes']['total'] / 1e6:.1f} MB")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
