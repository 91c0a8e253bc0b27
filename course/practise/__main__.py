"""Practise on a sick run: `python -m course.practise 7` draws run number 7, and says what to look at.

Exit code: 0, and after `--answer` only if it is right, else 1; 2 if the command or the layout is impossible.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from course.practise.answers import RIGHT
from course.practise.causes import CAUSES, causes_text
from course.practise.draws import HEALTHY
from course.practise.sick import PractiseError, SickRun
from lib.layout import Layout
from lib.model import GPTConfig
from lib.training.config import TrainConfig, add_options, chosen, in_options

NEXT = """
It has one sickness, or two. The optimizer, the text and one process are healthy. Look at
  --report [FILE.json]   losses and norms, gradients by kind and by rank, bytes, waiting: beside {beside}
  --plan                 what each rank should send and hold
  --trace FILE.json      the last step of all ranks, for https://ui.perfetto.dev{certify}
Options of lib.train change the layout and leave the sickness: --dp 1 --tp 2, --microbatches 1, --dropout 0, --zero 1.
--causes lists what it can be; healthy instead of a seed is a run without sickness. Then answer, of two causes both:
  {program} {seed} --answer CAUSE PLACE"""

CERTIFY = "\n  --certify              whether it is the same training as one process, in float64"
SETTINGS = (Layout, GPTConfig, TrainConfig)  # of which options change a sick run


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m course.practise",
        description="Find what is wrong with a small run of lib.train, drawn by a seed.",
        epilog="All further options are those of python -m lib.train.",
    )
    parser.add_argument(
        "drawn_by", nargs="?", metavar="SEED", help="a number, an exercise, or healthy: 7, 15.1, 15.1A"
    )
    parser.add_argument("--causes", action="store_true", help="list all possible causes, and how a place is written")
    parser.add_argument("--report", nargs="?", const="", metavar="FILE.json", help="print a report; write it as data")
    parser.add_argument("--trace", metavar="FILE.json", help="write the last step of all ranks as a trace")
    parser.add_argument("--plan", action="store_true", help="print the plan of the run, and start nothing")
    parser.add_argument(
        "--no-twin", action="store_true", help="a harder run: no training in one process to compare it with"
    )
    parser.add_argument("--certify", action="store_true", help="compare three steps with one process in float64")
    answer = "judge an answer; of a run with two causes give this twice"
    parser.add_argument("--answer", nargs=2, action="append", metavar=("CAUSE", "PLACE"), help=answer)
    add_options(parser, SETTINGS)
    args = parser.parse_args(argv)
    if args.causes:
        return print(causes_text())
    if args.drawn_by is None:
        parser.exit(
            2, f"{parser.prog}: which run? Give a number, such as {parser.prog} 7; --causes lists the causes\n"
        )
    try:
        run = SickRun.drawn(args.drawn_by)
        if args.answer:
            return parser.exit(_judged(run, args.answer))
        if args.no_twin:
            run = run.without_twin()
        changed = {name: x for of in SETTINGS for name, x in chosen(args, of).items()}
        _show(run.under(**changed), args, parser.prog)
    except PractiseError as error:
        parser.exit(2, f"{parser.prog}: {in_options(str(error))}\n")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: {error.filename} cannot be written: {error.strerror}\n")


def _show(run: SickRun, args: argparse.Namespace, program: str) -> None:
    """Print and write what was asked for; without a wish, the run in two lines and what to do next."""
    if args.plan:
        print(run.plan())
    if args.certify:
        print("the farthest from one process: loss {:.1g}, gradient {:.1g}, weight {:.1g}".format(*run.certify()))
    if args.report is not None:
        print(run.report())
        if args.report:
            with open(args.report, "w", encoding="utf-8") as file:
                json.dump(asdict(run.report()), file)
    if args.trace:
        run.trace().save(args.trace)
        print(f"trace: open {args.trace} at https://ui.perfetto.dev")
    if not (args.plan or args.certify or args.trace or args.report is not None):
        print(run if run.seed == HEALTHY else f"{run}\n{_next(run, program)}")


def _next(run: SickRun, program: str) -> str:
    """What to look at, and how to answer."""
    beside, certify = ("one process and plan", CERTIFY) if run.twin else ("plan", "")
    return NEXT.format(beside=beside, certify=certify, program=program, seed=run.seed)


def _judged(run: SickRun, named: list[tuple[str, str]]) -> int:
    """Print the verdict, and return the exit code."""
    if unknown := [name for name, _ in named if name not in CAUSES]:
        raise PractiseError(f"{unknown[0]!r} is not in the catalogue: --causes lists {', '.join(CAUSES)}")
    status, said = run.answer(*named)
    print(f"{status}\n{said}")
    return int(status != RIGHT)


if __name__ == "__main__":
    main()
