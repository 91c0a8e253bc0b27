"""Calls that a script makes under torchrun, or alone, and that cannot work in a rank of `run`: refused in a sentence.

The problem: a script connects its processes by itself; in a rank they are connected, and torch says only that this was
done twice. And a debugger asks for commands; a rank has no terminal, and pdb ends in an error without words, `BdbQuit`.
The idea: the two functions say what to do instead. A debugger that brings its own input, over a socket, works.
"""

import functools
import pdb
import sys

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TWICE = (
    "run() has connected its ranks already: drop init_process_group() from the function, and destroy_process_group() "
    "at its end. `world` is the group of all ranks; torch.distributed works as usual"
)
NO_TERMINAL = (
    "a rank of run() has no terminal, so no debugger can stop here. Call the function itself, as the only rank: "
    "fn(Group(), ...), with Group of mesh.py. To stop one of several ranks, start the script once for each in a "
    "terminal of its own, with init() and torchrun's variables: see the page Ranks without the book"
)


def refuse_in_ranks() -> None:
    """Refuse them in this process from now on."""
    connect, stop = dist.init_process_group, pdb.Pdb.set_trace

    @functools.wraps(connect)
    def init_process_group(*args: object, **kwargs: object) -> None:
        if dist.is_initialized():
            raise RuntimeError(TWICE)
        connect(*args, **kwargs)

    @functools.wraps(stop)
    def set_trace(debugger: pdb.Pdb, frame: object = None, **kwargs: object) -> None:
        if debugger.stdin is sys.stdin:
            raise RuntimeError(NO_TERMINAL)
        stop(debugger, frame or sys._getframe(1), **kwargs)

    dist.init_process_group = c10d.init_process_group = init_process_group
    pdb.Pdb.set_trace = set_trace
