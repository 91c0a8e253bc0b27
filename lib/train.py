"""Train the GPT, in one process or in many: `python -m lib.train --dp 2 --zero 1`.

The loop is the one of the book: a batch, a step, now and then a look at text that was not trained on. It is the same
for every layout, as `lib/parallel.py` makes one step of all. It runs in three ways, which only this file has to
know: alone, through `run` on this machine, or under `torchrun`. The same seed gives the same losses in each, to
rounding: that is what layouts are compared with (`--report`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from lib import data, trace
from lib.launch import MAX_RANKS, RunError, close, device, init, run
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, RECOMPUTE, GPTConfig
from lib.options import add_options, chosen, in_options, option
from lib.parallel import ParallelGPT
from lib.train_config import COMPUTE_DTYPES, DTYPES, SCHEDULES, STAGES, TrainConfig

BAR = "{percentage:3.0f}% {bar:16} step {n_fmt}/{total_fmt}{postfix}, {remaining} left"  # "rank 0 | " comes before
VALIDATION_ROWS = 64
CHOICES = {
    "schedule": list(SCHEDULES),
    "zero": STAGES,
    "recompute": RECOMPUTE,
    "dtype": list(DTYPES),
    "compute_dtype": list(COMPUTE_DTYPES),
}


def train(world: Group, config: TrainConfig, quiet: bool = False) -> dict:
    """Train on all ranks of `world`, and return this rank's report.

    Returns:
        `losses`: mean loss of each step in nats per token, over all ranks, before the step. `validation`: pairs
        (step, loss). `traffic`: "kind axis" → calls and wire bytes that this rank sent in all steps. `peak_bytes`:
        the highest of each kind and of the total in one step, which need not be at the same moment. `step_s`: seconds
        of each step; the second one is slow, as its memory is watched.
    """
    model, corpus = build(world, config), data.load()
    report: dict = {"losses": [], "validation": [], "step_s": [], "peak_bytes": {}}
    traffic: dict = {}
    silent = quiet or world.rank > 0
    with tqdm(range(config.steps), bar_format=BAR, disable=silent, file=sys.stdout) as bar:
        for step in bar:
            if config.validate_every and step % config.validate_every == 0:
                report["validation"].append((step, validate(model, corpus.validation, config)))
            began_s = time.perf_counter()
            watches_memory = step == min(1, config.steps - 1)  # the first step in which everything is there
            with ExitStack() as stack:
                recorded = stack.enter_context(trace.record(world.rank))
                memory = stack.enter_context(model.memory()) if watches_memory else None
                loss = train_step(model, corpus.train, step, config)
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
        report["validation"].append((config.steps, validate(model, corpus.validation, config)))
    return report | {"traffic": traffic, "config": asdict(config)}


def build(world: Group, config: TrainConfig) -> ParallelGPT:
    """The model on the mesh of `config`, with its optimizer."""
    mesh = Mesh(MeshShape(dp=config.dp, pp=config.pp, tp=config.tp), world)
    torch.manual_seed(config.seed)
    model = ParallelGPT(
        GPT(config.model).to(device(), DTYPES[config.dtype]),
        mesh,
        partial(torch.optim.AdamW, lr=config.lr),
        config.make_schedule(),
        sequence_parallel=config.sequence_parallel,
        again=config.recompute,
        zero=config.zero,
        bucket_bytes=config.bucket_bytes,
        dtype=COMPUTE_DTYPES[config.compute_dtype] if config.compute_dtype else None,
    )
    # From here on randomness is for dropout: other rows or layers, other masks.
    torch.manual_seed(config.seed + world.rank // config.tp)
    return model


def train_step(model: ParallelGPT, tokens: Tensor, step: int, config: TrainConfig) -> float:
    """One step; the mean loss over all ranks, before the weights move."""
    inputs, targets = data.batch(
        tokens, step, global_batch=config.global_batch, context=config.model.context, seed=config.seed
    )
    return model.step(inputs, targets, config.max_norm).item()


def validate(model: ParallelGPT, tokens: Tensor, config: TrainConfig, limit: int = VALIDATION_ROWS) -> float:
    """Mean loss on `limit` sequences of the validation text, each rank its share."""
    return model.evaluate(*data.windows(tokens, config.model.context, limit)).item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lib.train", description="Train a small GPT on Python's help.")
    add_options(parser, TrainConfig, leave_out=("model",), choices=CHOICES)
    add_options(parser, GPTConfig, leave_out=("vocab_size",))  # a token is a byte
    parser.add_argument("--report", metavar="FILE.json", help="write losses, traffic, memory and times of all ranks")
    args = parser.parse_args(argv)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 0))  # of torchrun, or 0 and 0
    given = {"validate_every": 50} | chosen(args, TrainConfig)
    given.setdefault("dp", max(1, size // max(1, given.get("pp", 1) * given.get("tp", 1))))
    try:
        config = TrainConfig(model=GPTConfig(**chosen(args, GPTConfig)), **given)
        data.windows(data.load().validation, config.model.context, limit=1)  # whether the text is long enough
        ranks = config.dp * config.pp * config.tp
        layout = f"--dp {config.dp}"
        layout += "".join(f" {option(axis)} {n}" for axis, n in (("pp", config.pp), ("tp", config.tp)) if n > 1)
        if size and ranks != size:
            raise ValueError(f"{layout} needs {ranks} ranks, but torchrun started {size}")
        if not size and ranks > MAX_RANKS:
            raise ValueError(f"{layout} is more than {MAX_RANKS} ranks on one machine; use torchrun on several")
        if args.report and rank == 0:
            _check_writable(args.report)
    except ValueError as error:
        sentence = in_options(str(error), (TrainConfig, GPTConfig))
        parser.exit(2, f"{parser.prog}: {sentence}\n" if rank == 0 else None)
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
            try:
                with open(args.report, "w", encoding="utf-8") as file:
                    json.dump({"losses": reports[0]["losses"], "ranks": reports}, file)
            except OSError as error:
                losses = " ".join(f"{loss:.6g}" for loss in reports[0]["losses"])
                parser.exit(
                    1,
                    f"{parser.prog}: --report {args.report} could not be written: {error.strerror}. Losses: {losses}\n",
                )


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
