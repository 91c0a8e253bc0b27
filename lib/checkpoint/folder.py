"""A folder of checkpoints: a checkpoint with its final name is complete.

The problem: a process may die in the middle of a save, and half of a checkpoint looks like a checkpoint. If it was
to replace the last good one, none is left.
The idea: *write aside and rename*. A checkpoint is written into a hidden folder. When every rank has written its file,
and all files are on the disk, the folder is renamed, which a file system does completely or not at all:

    runs/.step-00000120        unfinished, or left by a process that died: removed by the next run
    runs/step-00000120         complete
    runs/step-00000110.broken  damaged later: renamed by --resume auto, which continued from 100

It holds the files of DCP, and `run.json` with data that is not a tensor, such as the number of finished steps. This
number is the position in the data, because a batch is a function of seed and step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import asdict, fields

import torch

from lib.checkpoint import files
from lib.checkpoint.files import BrokenCheckpoint, CheckpointError
from lib.checkpoint.settings import RunSettings, RunText
from lib.checkpoint.storage import check_shapes, files_of, read_metadata
from lib.model import GPT, GPTConfig

VERSION = 2  # of the format of a checkpoint; a newer lib has a larger version. 2 knows the text
RUN = "run.json"
CONTENT = {"version": int, "step": int, "optimizer": str, "config": dict, "losses": list, "validation": list}
# Together with the model, these settings determine the losses.
DECISIVE = (
    *("global_batch", "lr", "warmup_steps", "lr_end", "weight_decay", "beta1", "beta2", "max_norm", "seed", "dtype"),
    "compute_dtype",
)


def path_of(folder: str, step: int) -> str:
    return os.path.join(folder, f"step-{step:08d}")


def hidden(path: str) -> str:
    """The hidden path of a checkpoint while it is written or removed."""
    return os.path.join(os.path.dirname(path), "." + os.path.basename(path))


def complete(folder: str) -> list[str]:
    """Paths of the complete checkpoints in a folder, the newest last."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in sorted(names) if re.fullmatch(r"step-\d{8,}", name)]


def step_of(path: str) -> int:
    return int(os.path.basename(os.path.normpath(path)).removeprefix("step-"))


def publish(path: str, run: dict, keep: int) -> None:
    """Publish a written checkpoint, on rank 0: rename it, and remove all but the newest `keep`."""
    files.write_through(os.path.join(hidden(path), RUN), json.dumps({"version": VERSION} | run))
    files.note_checksums(hidden(path), {RUN: files.checksum(hidden(path), RUN)})
    _sync(hidden(path))
    os.rename(hidden(path), path)
    _sync(os.path.dirname(path))
    for old in complete(os.path.dirname(path))[:-keep]:
        os.rename(old, hidden(old))  # so that half a checkpoint never has a name
        remove_unfinished(hidden(old))


def _sync(folder: str) -> None:
    """Write the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: str) -> None:
    """Remove hidden folders and files of a run that died, and a request to stop it; make the folder if needed.

    Raises:
        CheckpointError: the request cannot be removed, so this run would stop, too.
    """
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if re.fullmatch(r"\.step-\d{8,}", name):
            remove_unfinished(os.path.join(folder, name))
        elif name == files.STOP or name.startswith(files.TOKEN):
            files.remove(folder, name)
    stop = os.path.join(folder, files.STOP)
    if os.path.lexists(stop):
        raise CheckpointError(f"{stop} asks the run to stop, and cannot be removed: move it away")


def remove_unfinished(path: str) -> None:
    """Remove the folder of a checkpoint without its name, or a file in its place."""
    shutil.rmtree(path, ignore_errors=True)
    files.remove(*os.path.split(path))


# ---- where to begin -------------------------------------------------------------------------------------------------


def check_can_write(folder: str) -> None:
    """Make the folder if needed, before hours of training.

    Raises:
        ValueError: nothing can be written there, or a run uses it.
    """
    probe = f".probe-{os.getpid()}"
    try:
        files.leave(folder, probe)
        os.remove(os.path.join(folder, probe))
    except OSError as error:
        raise ValueError(f"--checkpoint {folder} cannot be written: {files.reason(error)}") from None
    files.Lock(folder).release()


def choose(folder: str, resume: str | None, config: RunSettings) -> str | None:
    """The checkpoint that a run continues from; None for a new run. Reads each file once, to check it.

    Args:
        resume: a checkpoint, or "auto" for the newest in `folder`, if any. A damaged checkpoint is renamed and
            reported, and "auto" takes the previous one, so that a run that restarts at night continues.
        config: settings of the run, such as a `TrainConfig`; as data, they are in `run.json`.

    Raises:
        ValueError: the run cannot continue from it, or would write into a folder of a different run.
    """
    checkpoints = complete(folder)
    if resume is None:
        if checkpoints:
            raise ValueError(
                f"{folder} has checkpoints up to step {step_of(checkpoints[-1])}: continue from there with --resume "
                "auto, or give a different folder to --checkpoint"
            )
        return None
    if resume != "auto":
        _check(resume, config)
        newer = [path for path in checkpoints if step_of(path) > run_of(resume)["step"]]
        if newer:
            raise ValueError(
                f"--resume {resume}: {newer[-1]} is newer, so a later --resume auto would continue from it; move it "
                "away, or give a different folder to --checkpoint"
            )
        return resume
    broken: list[tuple[str, str]] = []
    for path in reversed(checkpoints):
        try:
            _check(path, config)
        except BrokenCheckpoint as error:
            broken.append((path, str(error)))
            continue
        for damaged, why in broken:
            print(f"{why}; renamed to {_set_aside(damaged)}; continuing from {path}", file=sys.stderr)
        return path
    if broken:
        raise ValueError(f"none of the {len(broken)} checkpoints in {folder} is complete: {broken[0][1]}")
    return None


def _set_aside(path: str) -> str:
    """Rename a broken checkpoint, so that its step can be saved again; return its new path."""
    aside, number = f"{path}.broken", 1
    while os.path.lexists(aside):
        number += 1
        aside = f"{path}.broken{number}"
    try:
        os.rename(path, aside)
    except OSError as error:
        raise CheckpointError(
            f"{path} is broken, and cannot be renamed: {files.reason(error)}; move it away"
        ) from None
    return aside


def run_of(path: str) -> dict:
    """The data about the run of a checkpoint.

    Raises:
        CheckpointError: it has a newer version, or (BrokenCheckpoint) is no checkpoint, or this data is damaged.
    """
    try:
        with open(os.path.join(path, RUN), "rb") as file:
            text = file.read()
    except OSError as error:
        raise BrokenCheckpoint(
            f"{path} is not a checkpoint: its {RUN} cannot be read: {files.reason(error)}"
        ) from None
    files.check_files(path, [RUN])
    try:
        run = json.loads(text)
    except ValueError:
        raise BrokenCheckpoint(f"{RUN} of {path} is damaged: it is not JSON") from None
    its = run if isinstance(run, dict) else {}
    version = its.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(f"{path} has version {version}, and this lib reads up to {VERSION}; use a newer lib")
    wrong = [name for name, kind in CONTENT.items() if not isinstance(its.get(name), kind)]
    if not wrong and not isinstance(its["config"].get("model"), dict):
        wrong = ["config"]
    if not wrong and not 0 <= its["step"] <= len(its["losses"]):
        wrong = ["step"]
    if wrong:
        raise BrokenCheckpoint(f"{RUN} of {path} is damaged: it has no valid {', '.join(wrong)}")
    return its


def _check(path: str, config: RunSettings) -> None:
    """Check that this run can continue from a checkpoint: complete, with the same model and optimizer."""
    run, metadata = run_of(path), read_metadata(path)
    now, before = asdict(config), run["config"]
    _check_text(config.corpus, before.get("corpus"), path)
    files.check_files(path, files_of(metadata))
    with torch.device("meta"):
        whole = GPT(config.model)
    check_shapes({name: p.shape for name, p in whole.named_parameters()}, metadata, path)
    for field in fields(GPTConfig):
        here, there = asdict(config.model)[field.name], run["config"]["model"].get(field.name, field.default)
        if here != there and field.name != "dropout":
            raise CheckpointError(f"{path} is of a different model: {field.name}={there} there, and {here} here")
    if run["step"] > config.steps:
        raise CheckpointError(f"{path} has {run['step']} finished steps, more than steps={config.steps}; use more")
    before = {field.name: field.default for field in fields(config)} | before  # an older lib has fewer settings
    falls = now["lr_end"] < 1  # along a cosine that ends with the last step
    decisive = [*DECISIVE, *(["steps"] if falls else [])]
    changed = [name for name in decisive if now[name] != before[name]]
    other = [f"{name}={now[name]} (was {before[name]})" for name in changed]
    if other:
        print(f"{path}: continues with {', '.join(other)}, so the losses differ from one run", file=sys.stderr)


def _check_text(here: RunText, before: dict | None, path: str) -> None:
    """Raise a CheckpointError if the checkpoint was trained on another text, or on other tokens of it."""
    its = {name: x for name, x in (before or {}).items() if hasattr(here, name)}
    there = type(here)(**its)  # an older lib had one text, the default
    if (here.sha256, here.tokens) != (there.sha256, there.tokens):
        raise CheckpointError(
            f"{path} was trained on {there.named()}, and this run reads {here.named()}: give it the same --text and "
            "--tokens, or a different folder to --checkpoint"
        )
