"""The training loop, the same for every layout: a batch, a step, and at intervals the validation loss.

The same seed gives the same losses in each layout, to rounding, because no random number depends on the layout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from lib import data, trace
from lib.launch import device, done_s
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT
from lib.parallel import parallelize
from lib.parallel_model import ParallelModel
from lib.training.config import COMPUTE_DTYPES, DTYPES, Checkpoints, TrainConfig
from lib.training.learning_rate import fraction_of_lr, set_learning_rate
from lib.training.sample import sample
from lib.training.step_log import StepLog
from lib.training.stop import Stop

BAR = "{percentage:3.0f}% {bar:16} step {n_fmt}/{total_fmt}{postfix}, {remaining} left"  # "rank 0 | " comes before
VALIDATION_ROWS = 64


def train(
    world: Group,
    config: TrainConfig,
    quiet: bool = False,
    checkpoints: Checkpoints | None = None,
    profile: bool = False,
    log: str | None = None,
    stop: str | None = None,
) -> dict:
    """Train on all ranks of `world`, and return the report of this rank.

    Args:
        quiet: no progress bar.
        checkpoints: folder to save to, and checkpoint to continue from; None saves nothing.
        profile: keep the trace of the last step; a GPU waits at each end of a span there, so the step is slower.
        log: file to which rank 0 adds a line a step (`StepLog`); None writes none.
        stop: let Ctrl-C, SIGTERM, SIGUSR1, or a file named stop in this folder, if any, end the run after a step, so
            that it returns its report; None leaves them alone. With checkpoints they do so in any case.

    Returns:
        `losses`: mean loss of each step in nats per token, over all ranks, before the step. `validation`: pairs (step,
        loss). `traffic`: "kind axis" → calls and wire bytes that this rank sent in all steps. `peak_bytes`: the peak of
        each kind and of the total in one step, perhaps at different times. `memory`: on rank 0, pairs (seconds, bytes
        of each kind) of that step. `step_s`: seconds of each step; the second step is slow, because its memory is
        tracked. If the run was resumed, `losses` and `validation` begin at its first step, all else at the first step
        of this process. With `checkpoints` or `stop` also `stopped_by`, the number of the signal that ended the run
        early, or 0; and `unsaved`, why its end is not on disk, or "". `profile`: a `Trace`, if requested and if the
        last step was taken. `sample`: on rank 0, what the model writes, if requested and if the run was not stopped.
    """
    corpus = config.corpus.load()
    model = build(world, config)
    report: dict = {"losses": [], "validation": [], "step_s": [], "peak_bytes": {}, "memory": []}
    traffic: dict = {}
    silent = quiet or world.rank > 0
    saver, first, recorded = None, 0, None
    if checkpoints:
        from lib.checkpoint.saver import Saver  # takes 1 s to import

        saver = Saver(model, checkpoints, asdict(config))
        first = saver.resume(report)
    requests = Stop(world, stop) if stop is not None and saver is None else None
    lines = _opened_log(log, first) if log and world.rank == 0 else None
    todo, in_all = range(first, config.steps), {"initial": first, "total": config.steps}
    with (
        saver or requests or nullcontext(),
        lines or nullcontext(),
        tqdm(todo, **in_all, bar_format=BAR, disable=silent, file=sys.stdout) as bar,
    ):
        for step in bar:
            measured = {}
            if config.validate_every and step % config.validate_every == 0:
                measured = {"validation": validate(model, corpus.validation, config)}
                report["validation"].append((step, measured["validation"]))
            began_s = time.perf_counter()
            watches_memory = step == min(first + 1, config.steps - 1)  # the first step with all optimizer states
            by = done_s if profile and step == config.steps - 1 else time.perf_counter
            watch = model.memory() if watches_memory else nullcontext()
            with trace.record(world.rank, by) as recorded, watch as memory:
                loss = train_step(model, corpus.train, step, config)
            report["step_s"].append(time.perf_counter() - began_s)
            report["losses"].append(loss)
            if lines:
                lr = config.lr * fraction_of_lr(step, config)
                lines.write(step=step, loss=loss, lr=lr, seconds=report["step_s"][-1], **measured)
            for (kind, axis), (calls, sent) in recorded.traffic().items():
                before = traffic.get(f"{kind} {axis}", (0, 0.0))
                traffic[f"{kind} {axis}"] = (before[0] + calls, before[1] + sent)
            if memory is not None:
                report |= {"peak_bytes": memory.peak_by_kind, "memory": [] if world.rank else memory.timeline}
            tokens_per_s = config.global_batch * config.model.context / report["step_s"][-1]
            held = f", {report['peak_bytes']['total'] / 1e6:,.1f} MB" if report["peak_bytes"] else ""
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s{held}", refresh=False)
            is_last = step + 1 == config.steps
            if (saver and saver.after(step + 1, report, is_last)) or (requests and requests.after_step()):
                break
        if saver:
            report |= {"stopped_by": saver.stopped_by, "unsaved": saver.unsaved}
        elif requests:
            unsaved = "nothing is saved, because there is no --checkpoint" if requests.stopped_by else ""
            report |= {"stopped_by": requests.stopped_by, "unsaved": unsaved}
        if not report.get("stopped_by"):
            if config.validate_every:
                report["validation"].append((config.steps, validate(model, corpus.validation, config)))
                if lines:
                    lines.write(step=config.steps, validation=report["validation"][-1][1])
            if config.corpus.sample:
                report["sample"] = sample(model, corpus, config)
    report |= {"traffic": traffic, "config": asdict(config)}
    reached = profile and recorded and not report.get("stopped_by")
    return report | {"profile": recorded} if reached else report


def _opened_log(path: str, first: int) -> StepLog | None:
    """The log, to which a run that begins after step `first` adds; None, after a word, if it cannot be opened."""
    try:
        return StepLog(path, continues=first > 0)
    except OSError as error:
        print(f"\n--log {path} cannot be written: {error.strerror}; training goes on", file=sys.stderr)
        return None


def build(world: Group, config: TrainConfig) -> ParallelModel:
    """The model on the mesh of `config`, with its optimizer."""
    mesh = Mesh(MeshShape(**config.layout.sizes), world)
    torch.manual_seed(config.seed)
    return parallelize(
        GPT(config.model).to(device(), DTYPES[config.dtype]),
        mesh,
        config.layout,
        adamw(config),
        seed=config.seed,
        bucket_bytes=config.bucket_bytes,
        dtype=COMPUTE_DTYPES[config.compute_dtype] if config.compute_dtype else None,
    )


def adamw(config: TrainConfig, lr: float | None = None) -> Callable[..., torch.optim.Optimizer]:
    """The function that makes the optimizer of a run, at `config.lr` or at the given learning rate."""
    of_run = {"betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
    return partial(torch.optim.AdamW, lr=config.lr if lr is None else lr, **of_run)


def train_step(model: ParallelModel, tokens: Tensor, step: int, config: TrainConfig) -> float:
    """One step; returns the mean loss over all ranks, before the update."""
    inputs, targets = data.batch(
        tokens, step, global_batch=config.global_batch, context=config.model.context, seed=config.seed
    )
    set_learning_rate(model.optimizer, step, config)
    return model.step(inputs, targets, config.max_norm, step).item()


def validate(model: ParallelModel, tokens: Tensor, config: TrainConfig, limit: int = VALIDATION_ROWS) -> float:
    """Mean loss on `limit` sequences of the validation text, divided among the ranks."""
    return model.evaluate(*data.windows(tokens, config.model.context, limit)).item()
