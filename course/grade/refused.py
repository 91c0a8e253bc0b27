"""System calls that a jail refuses: what they make has no file that a folder could hold, or counts as nobody's memory.

The problem: shared memory, queues and semaphores of the system, and keys of the kernel, stay when their process ends;
the next student's code could read them. The idea: a filter in the kernel, which no process of the jail can take off.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# By machine, the number of its architecture, and of: shmget shmat semget msgget mq_open, add_key request_key keyctl,
# memfd_create mount; then memfd_secret open_tree move_mount fsopen fsmount, whose numbers are the same everywhere.
_CALLS = {
    "x86_64": (0xC000003E, (29, 30, 64, 68, 240, 248, 249, 250, 319, 165, 447, 428, 429, 430, 432)),
    "aarch64": (0xC00000B7, (194, 196, 190, 186, 180, 217, 218, 219, 279, 40, 447, 428, 429, 430, 432)),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of the kernel's filters
_REFUSE, _ALLOW = 0x00050000 | errno.EPERM, 0x7FFF0000
_OTHER_TABLE = 0x40000000  # from this number on, an x86 processor's calls in a second table


def refuse() -> None:
    """Refuse them from now on, in this process and its children, on the machines above."""
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges: without, only root may filter
    machine, calls = _CALLS.get(platform.machine(), (0, ()))
    last = len(calls) + 5  # the step that refuses
    rows = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 0, last - 2, machine),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, last - 4, 0, _OTHER_TABLE),
    ]
    rows += [(_EQUAL, last - 5 - k, 0, number) for k, number in enumerate(calls)]
    rows += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    steps = b"".join(struct.pack("HBBI", *row) for row in rows)
    program = struct.pack("HP", len(rows), ctypes.cast(steps, ctypes.c_void_p).value)
    if calls:
        libc.prctl(22, 2, program, 0, 0)
