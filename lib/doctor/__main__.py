"""The command line: `torchrun … -m lib.doctor` on a cluster, `python -m lib.doctor --ranks 4` on one machine,
`python -m lib.doctor trace FILE…` for the traces of a run, and `python -m lib.doctor numbers ONE FOUR` for its numbers.
Exit code 1: something looks wrong; 2: too little could be seen, or the words cannot be understood.
"""

import argparse
import sys

from lib.cost.hardware import GPUS
from lib.doctor.exam import on_this_machine, under_torchrun
from lib.doctor.expected import Expected
from lib.doctor.numbers import compare_numbers, page_of_numbers, read_numbers
from lib.doctor.page import tell
from lib.doctor.traces import page_of, verdict_of
from lib.kineto import read_traces
from lib.launch import RunError
from lib.mesh import MeshShape
from lib.torchrun.last_word import leave_last_word
from lib.torchrun.start import of_torchrun, speaks


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lib.doctor", description="Examine the ranks and their links.")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="on this machine, without torchrun")
    parser.add_argument("--axes", metavar="dp=2,tp=2", help="measure the groups along these axes, outermost first")
    parser.add_argument("--json", metavar="FILE", help="write what was measured, found and not judged")
    parser.add_argument("--expect", metavar="400Gb", help="what one link between hosts should give, in one direction")
    parser.add_argument("--gpu", metavar="NAME", help=f"what links and GPUs should give: one of {', '.join(GPUS)}")
    commands = parser.add_subparsers(title="instead of examining", metavar="trace or numbers")
    traces = commands.add_parser("trace", help="read traces of torch.profiler, one of each rank")
    traces.add_argument("trace", nargs="+", metavar="FILE.json", help="or .json.gz")
    numbers = commands.add_parser("numbers", help="compare the steps of two runs that watch() recorded")
    numbers.add_argument("one", metavar="ONE", help="the folder of one process, or of a layout that you trust")
    numbers.add_argument("ours", metavar="PARALLEL", help="the folder of the run in question")
    numbers.add_argument("--exact", metavar="FOLDER", help="one process in a wider type: shows how large rounding is")
    args = parser.parse_args(argv)
    try:
        if "one" in args:
            found = compare_numbers(
                *(read_numbers(one) if one else None for one in (args.one, args.ours, args.exact))
            )
            print(page_of_numbers(found))
            sys.exit(found.exit_code)
        if "trace" in args:
            trace = read_traces(args.trace)
            print(page_of(trace))
            sys.exit(verdict_of(trace)[1])
        rank, size = of_torchrun()
        shape, expected = _shape(args.axes, size or args.ranks), Expected.of(args.expect, args.gpu)
        report = under_torchrun(rank, size, shape, args.json, expected) if size else on_this_machine(shape, expected)
    except (RunError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if rank == 0 or not report.members[0] and (rank == 1 or speaks(rank)):  # if rank 0 did not come, another tells
        tell(report, args.json)
    if report.exit_code:
        why = report.findings[0].text if report.findings else "there was nothing to compare: see the page"
        leave_last_word(f"{parser.prog}: {why}")
    sys.exit(report.exit_code)


def _shape(axes: str | None, ranks: int) -> MeshShape:
    """The mesh that `--axes` names; without it one axis of all ranks."""
    if axes is None:
        return MeshShape(world=ranks)
    try:
        shape = MeshShape(**{name: int(n) for name, n in (axis.split("=") for axis in axes.split(","))})
    except ValueError:
        raise ValueError(f"--axes {axes} must be axes and their sizes, such as dp=2,tp=2") from None
    if shape.size != ranks:
        raise ValueError(f"--axes {axes} needs {shape.size} ranks, and there are {ranks}")
    return shape


if __name__ == "__main__":
    main()
