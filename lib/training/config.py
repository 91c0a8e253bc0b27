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
from dataclasses import dataclass, field, fields

import torch

from lib.checkpoint.settings import Checkpoints
from lib.cost.sizes import BUCKET_BYTES, RECOMPUTE, ZERO_STAGES
from lib.layout import SCHEDULES, Layout, whole_number
from lib.model import GPTConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64}
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16}  # float16 would need loss scaling


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Args:
        model: sizes of the GPT.
        layout: parallelism over ranks.
        steps: optimizer steps.
        global_batch: sequences per step, over all ranks.
        lr: learning rate of AdamW.
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
    steps: int = 100
    global_batch: int = 16
    lr: float = 3e-3
    max_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    compute_dtype: str | None = None
    validate_every: int = 0
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("global_batch", 1), ("bucket_bytes", 1), ("validate_every", 0)):
            whole_number(name, getattr(self, name), least)
        for name in ("lr", "max_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
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

SETTINGS = (TrainConfig, Layout, GPTConfig, Checkpoints)  # their fields become options
NO_OPTIONS = ("model", "layout", "vocab_size")  # a token is a byte
CHOICES = {
    "schedule": list(SCHEDULES),
    "zero": ZERO_STAGES,
    "recompute": RECOMPUTE,
    "dtype": list(DTYPES),
    "compute_dtype": list(COMPUTE_DTYPES),
}
KINDS = {"int": int, "float": float, "str": str}


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each field of `SETTINGS`: `stages_per_rank` is `--stages-per-rank`."""
    for config in SETTINGS:
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
    """Field → its description in the docstring, under `Args:`."""
    _, _, text = inspect.getdoc(config).partition("Args:\n")
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|^\w|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(words.split()).rstrip(".") for name, words in entries}


def in_options(sentence: str) -> str:
    """The sentence of an error with options instead of fields: `dp=3` becomes `--dp 3`."""
    for name in (setting.name for config in SETTINGS for setting in fields(config)):
        said = rf"(?<![\w-])(?:num_)?{name}=(?:'([^']*)'|([^\s,;:()]+))"
        sentence = re.sub(said, lambda m, name=name: f"{option(name)} {m[1] or m[2]}", sentence)
        if "_" in name:
            sentence = re.sub(rf"(?<![\w-]){name}(?![\w=-])", option(name), sentence)
    return sentence
