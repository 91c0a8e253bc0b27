"""Settings of a training run, checked before it starts, and the command-line options that are made from them.

The problem: the settings of a program are named three times, in a dataclass, in its documentation and in a parser, and
the three drift apart. The idea: a field is an option with its type and default, and its line under `Args:` in the
docstring is the help. An error that names a field, `stages_per_rank=1`, becomes an error that names the option.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass

import torch

from lib.checkpoint.settings import Checkpoints
from lib.cost.sizes import BUCKET_BYTES, RECOMPUTE, ZERO_STAGES
from lib.cost.token_orders import TOKEN_ORDERS
from lib.layout import ATTENTION, CAPACITY_OVER, SCHEDULES, Layout, whole_number
from lib.model import GPTConfig
from lib.moe import BALANCE_OVER
from lib.training.text import TOKENS, Text

DTYPES = {"float32": torch.float32, "float64": torch.float64}
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16}  # float16 would need loss scaling


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Args:
        model: sizes of the GPT.
        layout: parallelism over ranks.
        corpus: the text that it trains on.
        steps: optimizer steps.
        global_batch: sequences per step, over all ranks.
        lr: highest learning rate of AdamW.
        warmup_steps: steps in which the learning rate rises to lr.
        lr_end: fraction of lr to which it then falls until the last step, along a cosine; 1 is a constant rate.
        weight_decay: of AdamW, which takes learning rate times weight_decay of every weight in each step, also of norms
            and biases.
        beta1: of AdamW, how much of its mean of gradients stays in a step.
        beta2: of AdamW, how much of its mean of squared gradients stays in a step.
        max_norm: norm to which all gradients together are clipped.
        seed: seed of weights, data and dropout, equal in every layout.
        dtype: dtype of the weights that the optimizer steps.
        compute_dtype: dtype of computation and communication, with master weights in dtype; needs zero=1, 2 or 3.
        validate_every: steps between measurements of the validation loss; 0 is never.
        bucket_bytes: size of a gradient bucket; zero=3 sends one block at a time.

    Raises:
        ValueError: an invalid number, or a model and a batch that cannot be split.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    layout: Layout = field(default_factory=Layout)
    corpus: Text = field(default_factory=Text)
    steps: int = 100
    global_batch: int = 16
    lr: float = 3e-3
    warmup_steps: int = 0
    lr_end: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    max_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    compute_dtype: str | None = None
    validate_every: int = 0
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "bucket_bytes"):
            whole_number(name, getattr(self, name), 1)
        for name in ("validate_every", "warmup_steps"):
            whole_number(name, getattr(self, name), 0)
        for name in ("lr", "max_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        for name, below in (("weight_decay", math.inf), ("beta1", 1), ("beta2", 1)):
            if not 0 <= getattr(self, name) < below:
                at_most = f" and less than {below}" if below == 1 else ", and finite"
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0{at_most}")
        if not 0 <= self.lr_end <= 1:
            raise ValueError(f"lr_end={self.lr_end} must be a fraction of lr, from 0 to 1 (1: a constant rate)")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} leaves none of steps={self.steps} for the full learning rate; warm "
                "up for fewer, or take more steps"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.compute_dtype not in (None, *COMPUTE_DTYPES):
            raise ValueError(f"compute_dtype={self.compute_dtype!r} must be None or {', '.join(COMPUTE_DTYPES)}")
        if self.compute_dtype and not self.layout.zero:
            raise ValueError(
                "compute_dtype needs master weights, which plain data parallelism does not keep; use zero=1"
            )
        if self.seed not in range(2**63):
            raise ValueError(f"seed={self.seed} must be a whole number from 0 to 2**63 - 1")
        self.layout.check(self.model, self.global_batch)


# ---- on the command line --------------------------------------------------------------------------------------------

SETTINGS = (TrainConfig, Text, Layout, GPTConfig, Checkpoints)  # their fields become options
NO_OPTIONS = ("model", "layout", "corpus", "vocab_size", "sha256")  # the last two follow from the text
CHOICES = {
    "schedule": list(SCHEDULES),
    "zero": ZERO_STAGES,
    "recompute": RECOMPUTE,
    "attention": ATTENTION,
    "token_order": TOKEN_ORDERS,
    "balance_over": BALANCE_OVER,
    "capacity_over": CAPACITY_OVER,
    "tokens": list(TOKENS),
    "dtype": list(DTYPES),
    "compute_dtype": list(COMPUTE_DTYPES),
}
KINDS = {"int": int, "float": float, "str": str}


def add_options(parser: argparse.ArgumentParser, settings: Sequence[type] = SETTINGS) -> None:
    """An option for each field of these dataclasses: `stages_per_rank` is `--stages-per-rank`."""
    for config in settings:
        says = _described(config)
        for setting in fields(config):
            if setting.name in NO_OPTIONS:
                continue
            more: dict = {"help": says.get(setting.name, "").replace("%", "%%"), "default": argparse.SUPPRESS}
            if "bool" in str(setting.type):
                more["action"] = argparse.BooleanOptionalAction
            else:
                more |= {
                    "type": KINDS[str(setting.type).removesuffix(" | None")],
                    "choices": CHOICES.get(setting.name),
                }
                more["metavar"] = None if more["choices"] else setting.name.upper()
            parser.add_argument(option(setting.name), **more)


def option(name: str) -> str:
    """The name of a field on the command line."""
    return "--" + name.replace("_", "-")


def chosen(args: argparse.Namespace, config: type) -> dict:
    """The options of this dataclass that were given."""
    return {setting.name: getattr(args, setting.name) for setting in fields(config) if hasattr(args, setting.name)}


def _described(config: type) -> dict[str, str]:
    """Field → its description in the docstring, under `Args:`, of the class and of those that it extends."""
    described = {}
    for kind in (kind for kind in config.__mro__ if is_dataclass(kind)):
        _, _, text = inspect.getdoc(kind).partition("Args:\n")
        entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|^\w|\Z)", text, re.MULTILINE | re.DOTALL)
        described |= {name: " ".join(words.split()).rstrip(".") for name, words in entries}
    return described


def in_options(sentence: str) -> str:
    """The sentence of an error with options instead of fields: `dp=3` becomes `--dp 3`."""
    for name in (setting.name for config in SETTINGS for setting in fields(config)):
        for value, spelled in (("True", option(name)), ("False", option(f"no_{name}"))):
            sentence = re.sub(rf"(?<![\w-]){name}={value}\b", spelled, sentence)
        said = rf"(?<![\w-])(?:num_)?{name}=(?:'([^']*)'|([^\s,;:()]+))"
        sentence = re.sub(said, lambda m, name=name: f"{option(name)} {m[1] or m[2]}", sentence)
        if "_" in name:
            sentence = re.sub(rf"(?<![\w-]){name}(?![\w=-])", option(name), sentence)
    return sentence
