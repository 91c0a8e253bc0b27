"""Train the GPT, in one process or in many: `python -m lib.train --dp 2 --pp 2 --tp 2`.

The same command line serves one process, the ranks of one machine, and `torchrun`. Only this file depends on
`torchrun`.
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import NoReturn

from lib import data
from lib.checkpoint.files import CheckpointError
from lib.checkpoint.signals import pass_on
from lib.lab.certificate import batches_to_certify, certify_run
from lib.lab.profile import step_profile
from lib.launch import MAX_RANKS, RunError, close, init, run
from lib.layout import Layout, nearest
from lib.mesh import Group
from lib.model import GPTConfig
from lib.planner import Plan
from lib.planner.plan_report import report_of_plan
from lib.torchrun.last_word import leave_last_word
from lib.torchrun.start import StartError, machines, of_torchrun, speaks
from lib.training.asked import check_outputs, check_purpose, left_alone
from lib.training.config import (
    COMPUTE_DTYPES,
    DTYPES,
    Checkpoints,
    TrainConfig,
    add_options,
    chosen,
    in_options,
    option,
)
from lib.training.config_file import options_of_file, written_config
from lib.training.loop import train
from lib.training.text import Text

SAMPLE = 120  # tokens


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    rank, problem, config, checkpoints = 0, "", None, None
    try:
        rank, size = of_torchrun()
        if args.config:
            _add_from_file(args)
        config = _config(args, size)
        if args.ranks_per_node < 1:
            raise ValueError(f"--ranks-per-node {args.ranks_per_node} must be a whole number of at least 1")
        check_purpose(args)
        if rank == 0:
            check_outputs(args)
        if args.profile and config.steps < 3:
            raise ValueError("--profile needs a step after the first two, because they are slow: use steps=3 or more")
        if args.certify:
            config.layout.check_capacity(config.model)
            batches_to_certify(config)
        checkpoints = _checkpoints(args, config, rank)
    except ValueError as error:
        problem = in_options(str(error))
    speak = speaks(rank)
    starts = not (args.plan or args.save_config)
    if problem and (not starts or machines() == 1):  # otherwise the other machines must get it, too
        _end(parser, 2, problem, speak)
    if rank == 0 and not problem and (left := left_alone(args)):
        print(left, file=sys.stderr)
    ranks = config.layout.num_ranks if config else size
    if not starts:
        if rank == 0:
            print(written_config(_flat(config, checkpoints)) if args.save_config else _plan(config, args))
        return
    ends_with_report = bool(args.report) and checkpoints is None and not args.certify
    more = (checkpoints, bool(args.profile), args.log, "" if ends_with_report else None)
    work, more = (certify_run, ()) if args.certify else (_trained, more)
    try:
        if size or ranks == 1:
            world = init(settings=_equal_on_all(config, checkpoints, args), problem=problem)
            reports = close(world, work(world, config, *more))
        else:
            with _passing_on(checkpoints, ends_with_report) as folder:
                more = (*more[:-1], folder) if ends_with_report else more
                reports = list(run(work, ranks, config, *more, timeout_s=30 * 24 * 3600))
        if isinstance(reports[0], CheckpointError):
            raise reports[0]
    except StartError as error:
        _end(parser, 2, in_options(str(error)), speak)
    except CheckpointError as error:
        _end(parser, 1, str(error), speak)
    except RunError as error:
        _end(parser, 1, str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted\n" if speak else None)
    if args.certify:
        if rank == 0:
            print("the farthest from one process: loss {:.1g}, gradient {:.1g}, weight {:.1g}".format(*reports[0]))
            if reports[0].difference:
                print(f"the first difference: {reports[0].difference}")
        parser.exit(not reports[0].holds())
    stopped_by = reports[0].get("stopped_by")
    if rank == 0:
        if not stopped_by:
            print(_summary(config, reports[0]))
        for name, write in (("profile", _write_profile), ("report", _write_report)):
            if path := getattr(args, name):
                try:
                    print("\n" * bool(stopped_by) + write(path, config, reports))
                except OSError as error:
                    losses = " ".join(f"{loss:.6g}" for loss in reports[0]["losses"])
                    failed = f"--{name} {path} could not be written: {error.strerror}. Losses: {losses}"
                    _end(parser, 1, failed)
    if stopped_by:
        done, name = len(reports[0]["losses"]), signal.Signals(stopped_by).name
        said = reports[0]["unsaved"] or "it is saved, and --resume auto continues from there"
        # After any other code torchrun would start the ranks again.
        code = 0 if size and not reports[0]["unsaved"] else 128 + stopped_by
        parser.exit(code, f"\n{parser.prog}: {name}: stopped after step {done}; {said}\n" * speak)
    if problem := reports[0].get("unsaved"):
        _end(parser, 1, problem, speak)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        leave_last_word(f"{self.prog}: error: {message}")
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m lib.train", description="Train a small GPT on little stories, or on your text.")
    add_options(parser)
    parser.add_argument("--config", metavar="FILE.toml", help="read these options from a file; those given here win")
    save = "print the options of this run as such a file, and start nothing"
    parser.add_argument("--save-config", action="store_true", help=save)
    log = "write a JSON line a step while it runs: step, loss before it, lr, seconds, and validation if measured"
    parser.add_argument("--log", metavar="FILE.jsonl", help=log)
    report = "write losses, traffic, memory and times of all ranks, also after Ctrl-C, which then waits for the step"
    parser.add_argument("--report", metavar="FILE.json", help=report)
    parser.add_argument("--profile", metavar="FILE.json", help="write the last step of all ranks as a trace (slower)")
    plan = "print the messages and the memory of the run, and start nothing"
    parser.add_argument("--plan", action="store_true", help=plan)
    same = "compare this layout with one process for three steps in float64, and train nothing"
    parser.add_argument("--certify", action="store_true", help=f"{same}; exit code 1: they differ, and it says where")
    per_node = os.environ.get("LOCAL_WORLD_SIZE") or 8
    parser.add_argument("--ranks-per-node", type=int, metavar="N", default=per_node, help="for --plan")
    return parser


def _end(parser: argparse.ArgumentParser, code: int, sentence: str, speak: bool = True) -> NoReturn:
    """End with an error: say it, and let torchrun say it at the end of its own words."""
    said = f"{parser.prog}: {sentence}"
    leave_last_word(said)  # on every rank: torchrun shows the first that ended
    parser.exit(code, f"{said}\n" if speak else None)


def _trained(
    world: Group,
    config: TrainConfig,
    checkpoints: Checkpoints | None,
    profile: bool,
    log: str | None,
    stop: str | None,
) -> dict | CheckpointError:
    """The report of `train`, or its CheckpointError: every rank raises the same, and none is the rank that failed."""
    try:
        return train(world, config, False, checkpoints, profile, log, stop)
    except CheckpointError as error:
        return error


def _equal_on_all(config: TrainConfig | None, checkpoints: Checkpoints | None, args: argparse.Namespace) -> dict:
    """The settings by which the ranks of all machines are compared."""
    if config is None:
        return {}
    flat = {"profile": bool(args.profile), "report": bool(args.report)} | _flat(config, checkpoints)
    own = ("resume", "text")  # rank 0 chooses the checkpoint; a file may have another name where its SHA-256 is equal
    return {name: value for name, value in flat.items() if name not in own}


def _flat(config: TrainConfig, checkpoints: Checkpoints | None) -> dict[str, object]:
    """Field → value, of all settings of a run."""
    flat = asdict(config)
    parts = [flat.pop(name) for name in ("model", "layout", "corpus")]
    for part in (*parts, asdict(checkpoints) if checkpoints else {}):
        flat |= part
    return flat


def _add_from_file(args: argparse.Namespace) -> None:
    """Add the options of the file that are not on the command line."""
    for name, value in options_of_file(args.config).items():
        if not hasattr(args, name):
            setattr(args, name, value)


def _config(args: argparse.Namespace, size: int) -> TrainConfig:
    """The settings that the options request.

    Args:
        size: number of ranks that torchrun started, or 0.

    Raises:
        ValueError: they are impossible; if the layout is the cause, the message gives the nearest possible layout.
    """
    wanted, others = chosen(args, Layout), {"validate_every": 50} | chosen(args, TrainConfig)
    inner = math.prod(wanted.get(axis, 1) for axis in ("pp", "cp", "tp"))
    wanted.setdefault("dp", max(1, size // max(1, inner)))
    sizes, corpus = chosen(args, GPTConfig), Text(**{"sample": SAMPLE} | chosen(args, Text))
    corpus = corpus.read(GPTConfig(**sizes).context)
    model = GPTConfig(**sizes, vocab_size=corpus.vocab_size())
    try:
        config = TrainConfig(model=model, layout=Layout(**wanted), corpus=corpus, **others)
        layout = config.layout
        degrees = " ".join(f"{option(axis)} {n}" for axis, n in layout.sizes.items() if n > 1 or axis == "dp")
        if size and layout.num_ranks != size:
            raise ValueError(f"{degrees} needs {layout.num_ranks} ranks, but torchrun started {size}")
        starts = not (args.plan or args.save_config)
        if not size and starts and layout.num_ranks > MAX_RANKS:
            raise ValueError(f"{degrees} is more than {MAX_RANKS} ranks on one machine; use torchrun on several")
        return config
    except ValueError as error:
        batch = others.get("global_batch", TrainConfig.global_batch)
        fits = nearest(wanted, model, batch, size, MAX_RANKS) if batch > 0 else None
        if fits is None or all(getattr(fits, name) == value for name, value in wanted.items()):
            raise  # it is not the layout
        changed = " ".join(f"{name}={value}" for name, value in fits.differs(Layout()).items())
        raise ValueError(f"{error}. Or take the nearest layout: {changed or 'one process'}") from error


def _checkpoints(args: argparse.Namespace, config: TrainConfig, rank: int) -> Checkpoints | None:
    """The folder to save to and the checkpoint to continue from, which rank 0 chooses for all; None to save nothing.

    Raises:
        ValueError: a folder, or a checkpoint, that cannot be used.
    """
    wanted = chosen(args, Checkpoints)
    if wanted and "checkpoint" not in wanted:
        raise ValueError(f"{option(next(iter(wanted)))} needs a folder: also give --checkpoint DIR")
    settings = Checkpoints(**wanted) if wanted else None
    if args.plan or args.certify:
        return None  # these train nothing
    if settings is None or rank > 0 or args.save_config:
        return settings
    from lib.checkpoint.folder import check_can_write, choose  # takes 1 s to import

    check_can_write(settings.checkpoint)
    return replace(settings, resume=choose(settings.checkpoint, settings.resume, config))


@contextmanager
def _passing_on(checkpoints: Checkpoints | None, ends_with_report: bool) -> Iterator[str]:
    """A context in which a signal asks the ranks to stop, if they save or report: through a file in this folder."""
    if checkpoints:
        with pass_on(checkpoints.checkpoint):
            yield checkpoints.checkpoint
    elif ends_with_report:
        with tempfile.TemporaryDirectory() as folder, pass_on(folder):
            yield folder
    else:
        yield ""


def _plan(config: TrainConfig, args: argparse.Namespace) -> str:
    return report_of_plan(planned(config), args.ranks_per_node)


def planned(config: TrainConfig) -> Plan:
    """The plan of a run, before it starts."""
    own = DTYPES[config.dtype].itemsize
    itemsize = COMPUTE_DTYPES[config.compute_dtype].itemsize if config.compute_dtype else own
    text = config.corpus.load().train.untyped_storage().nbytes()
    master = own if config.compute_dtype else None
    return Plan(config.model, config.layout, config.global_batch, itemsize, master, config.bucket_bytes, text)


def _write_profile(path: str, config: TrainConfig, reports: list[dict]) -> str:
    if "profile" not in reports[0]:
        if reports[0].get("stopped_by"):
            return f"profile: {path} is not written, because the last step, which it shows, was not reached"
        return f"profile: {path} is not written, because no step was left to record"
    step_profile(planned(config), [report.pop("profile") for report in reports]).save(path)
    return f"profile: open {path} at https://ui.perfetto.dev to see step {config.steps} of all ranks"


def _write_report(path: str, config: TrainConfig, reports: list[dict]) -> str:
    stopped, done = reports[0].get("stopped_by"), len(reports[0]["losses"])
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"losses": reports[0]["losses"], "ranks": reports}, file)
    so_far = f", as far as it came: {done} of {config.steps} steps" if stopped else ""
    return f"report: python -m book.figures.report {path} draws it{so_far}"


def _summary(config: TrainConfig, report: dict) -> str:
    sent = sum(sent for _, sent in report["traffic"].values())
    token = config.corpus.tokens.removesuffix("s")
    first, last = report["losses"][0], report["losses"][-1]
    before = [] if report["step_s"] else [f"all {config.steps} steps were done before: nothing was left to train"]
    wrote = [_shown(report["sample"])] if report.get("sample") else []
    lines = [
        *before,
        *wrote,
        f"loss: {first:.3f} nats per {token} in the first step, {last:.3f} in step {config.steps}",
    ]
    if report["validation"]:
        floor = data.unigram_entropy(config.corpus.load().validation)
        lines.append(f"validation: {report['validation'][-1][1]:.3f} ({token} frequencies alone give {floor:.3f})")
    if held := report["peak_bytes"].get("total"):  # nothing if all steps were done before
        lines.append(f"rank 0 sent {sent / 1e6:.1f} MB and held at most {held / 1e6:.1f} MB of tensors")
    return "\n".join(lines)


def _shown(sample: str) -> str:
    """What the model wrote, indented, as this terminal can show it."""
    lines = "\n".join(["the model writes:", *(f"    {line}" for line in sample.split("\n"))])
    encoding = sys.stdout.encoding or "utf-8"
    return lines.encode(encoding, "backslashreplace").decode(encoding)


if __name__ == "__main__":
    main()
