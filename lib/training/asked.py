"""What a command is asked for, checked before it starts: to train, or something that trains nothing; and its files.

The problem: an option that is not followed looks as if it were. The idea: two purposes at once are refused, and the
options that a purpose cannot follow are named.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields

from lib.checkpoint.settings import Checkpoints
from lib.training.config import option

PURPOSES = ("plan", "certify", "save_config")  # instead of training
READ, WRITTEN = ("text", "config"), ("log", "report", "profile")


def check_purpose(args: argparse.Namespace) -> None:
    """Raise a ValueError if two things are to be done instead of training."""
    if len(found := [option(name) for name in PURPOSES if getattr(args, name)]) > 1:
        raise ValueError(f"{found[0]} and {found[1]} both take the place of training: give one of them")


def left_alone(args: argparse.Namespace) -> str:
    """A sentence on options that are not followed because nothing is trained; "" if there are none."""
    if not any(getattr(args, name) for name in PURPOSES):
        return ""
    saved = () if args.save_config else [one.name for one in fields(Checkpoints)]  # they are in the file
    given = [option(name) for name in (*WRITTEN, *saved) if getattr(args, name, None)]
    return f"nothing is trained, and nothing comes of {', '.join(given)}" if given else ""


def check_outputs(args: argparse.Namespace) -> None:
    """Raise a ValueError now rather than after hours of training: a file cannot be written, or is needed."""
    first: dict[str, str] = {}
    for name in (*READ, *WRITTEN):
        if not (path := getattr(args, name, None)):
            continue
        if name in WRITTEN:
            folder = os.path.dirname(path) or "."
            if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
                raise ValueError(f"--{name} {path} cannot be written: give a file name in a folder that exists")
        other = first.setdefault(os.path.realpath(path), name)
        if other != name and not path.startswith("/dev/"):
            raise ValueError(
                f"--{name} {path} is also the file of --{other}, and would replace it; give another name"
            )
