"""The learning rate of each step: a linear warmup, then a cosine down to a fraction of the highest rate.

The problem: the first gradients are the largest, and AdamW knows their size only after some steps; and the last steps
should settle. The idea: with the highest rate lr, W steps of warmup, S steps in all and the last fraction e,

    step s < W    lr · (s + 1)/(W + 1)
    then          lr · (e + (1 − e) · (1 + cos(π · (s − W)/(S − W)))/2)

It is a function of the number of the step alone, so a run that continues from a checkpoint needs no state for it.

Source: the schedule of nanoGPT (Karpathy 2022), `get_lr`; Loshchilov & Hutter 2017 (SGDR), equation 5.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    from lib.training.config import TrainConfig


def fraction_of_lr(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0, as a fraction of `config.lr`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    done = min(1.0, (step - config.warmup_steps) / (config.steps - config.warmup_steps))
    return config.lr_end + (1 - config.lr_end) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: Optimizer, step: int, config: TrainConfig) -> None:
    """Let the optimizer take its next step at the rate of this step; call it on every rank."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * fraction_of_lr(step, config)
