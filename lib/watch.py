"""The call table: what each rank waits for, seen by all.

The problem: a collective is a promise that every rank makes the same call. Break it, and gloo hangs for thirty minutes,
aborts a process, or adds an int32 to a float32 and says nothing. The process that hangs cannot tell you why: the cause
is what *another* process did not do.

The idea: the ranks of one machine share a file in memory. Each writes there what it is about to call. Whoever comes
later to the same call compares; a difference is an error on the spot, with both sides named. And the process that
started the ranks reads the table when nothing moves, and draws who waits for whom.

Nothing here knows torch. A call costs a few microseconds (`make bench`).
"""

from __future__ import annotations

import linecache
import marshal
import mmap
import os
import struct
import sys
import sysconfig
import time
import zlib
from collections.abc import Sequence

STARTING, RUNNING, WAITING, FINISHED, FAILED = range(5)

# Native layouts: a number of eight bytes is written in one piece, so nobody reads half of it.
_HEAD = struct.Struct("QQI")  # state, moves, length of what follows
_NOTE, _HEAD_BYTES = 1024, 2048  # where the text of a refused call begins, and where it ends
_CHANNELS, _RING, _TEXT = 160, 64, 184
_CHANNEL = struct.Struct("QQ")  # key + 1, calls so far
_ENTRY = struct.Struct(f"Q{_TEXT}s{_TEXT}sd")  # number of the call + 1, what, where, due_s
_NUMBER = struct.Struct("Q")
_CHANNEL_BYTES = _CHANNEL.size + _RING * _ENTRY.size
_ROW_BYTES = _HEAD_BYTES + _CHANNELS * _CHANNEL_BYTES

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_MACHINE = tuple(_HERE + name for name in ("watch.py", "transfer.py", "comm.py", "rank.py", "mesh.py"))
_LIBRARIES = sorted({os.path.join(sysconfig.get_paths()[k], "") for k in ("purelib", "platlib", "stdlib")}, key=len)[
    ::-1
]


class MismatchError(RuntimeError):
    """Two ranks of a group made different calls where they must make the same one."""


class CallTable:
    """One row a rank: its state, what it waits for, and its last calls on each channel.

    A channel is a group of ranks, or the direction `src > dst` of two. Calls on a channel are numbered on each rank
    alone; call k of one rank must be call k of all.

    Args:
        path: file to map; all ranks of a run map the same one.
        world_size: number of rows.
        rank: my row, or None for the process that only reads.
    """

    def __init__(self, path: str, world_size: int, rank: int | None = None) -> None:
        if rank is None:
            with open(path, "wb") as file:
                file.truncate(world_size * _ROW_BYTES)  # sparse: only rows that are written take memory
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.world_size, self.rank = world_size, rank
        self._row = (rank or 0) * _ROW_BYTES
        self._moves = 0
        self._mine: dict[int, int] = {}  # channel key -> offset inside a row, for my row
        self._theirs: dict[tuple[int, int], int] = {}  # (rank, channel key) -> where it begins
        self._keys: dict[str, int] = {}
        self._calls: dict[int, int] = {}

    def close(self) -> None:
        self._map.close()

    # ---- what a rank writes ----

    def state(self, state: int, what: object = None) -> None:
        """Say what I am doing; every call counts as a move."""
        body = b"" if what is None else marshal.dumps(what)
        if len(body) > _NOTE - _HEAD.size:
            body = b""
        start = self._row + _HEAD.size
        self._map[start : start + len(body)] = body
        self._moves += 1
        _HEAD.pack_into(self._map, self._row, state, self._moves, len(body))

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        """Enter my next call on `channel`, compare it with those of the `members` that came before, give its number.

        A call that is refused has not been made: whoever catches the error may make the right one. `due_s` is when my
        emulated link is through with it (`lib.link`).

        Raises:
            MismatchError: a member's call of the same number is another one.
        """
        key = self._keys.get(channel)
        if key is None:
            key = self._keys[channel] = zlib.crc32(channel.encode())
        number = self._calls.get(key, 0)
        offset = self._mine.get(key)
        if offset is None:
            if len(self._mine) == _CHANNELS:
                self._calls[key] = number + 1
                return number  # more channels than places: such calls run unchecked
            offset = self._mine[key] = _HEAD_BYTES + len(self._mine) * _CHANNEL_BYTES
        place = _CHANNEL.size + number % _RING * _ENTRY.size
        at = self._row + offset + place
        mine = what.encode()[:_TEXT]
        _NUMBER.pack_into(self._map, at, 0)  # first the texts, then the number that makes them count
        _ENTRY.pack_into(self._map, at, 0, mine, where.encode()[:_TEXT], due_s)
        _NUMBER.pack_into(self._map, at, number + 1)
        _CHANNEL.pack_into(self._map, self._row + offset, key + 1, number + 1)
        entry = self._map[at : at + _NUMBER.size + len(mine) + (len(mine) < _TEXT)]  # with the zero that ends it
        for peer in members:
            if peer == self.rank or self._same(peer, key, place, entry):
                continue
            time.sleep(0.001)  # what differs may have been read while it was written: look again
            if not self._same(peer, key, place, entry):
                start = self._find(peer, key) + place
                _, theirs, line, _ = _ENTRY.unpack_from(self._map, start)
                text = _mismatch(number, {self.rank: (what, where), peer: (_text(theirs), _text(line))})
                note = text.encode()[: _HEAD_BYTES - _NOTE]
                self._map[self._row + _NOTE : self._row + _NOTE + len(note)] = note
                raise MismatchError(text)
        self._calls[key] = number + 1
        return number

    def due_s(self, channel: str, number: int, members: Sequence[int]) -> float:
        """The latest `due_s` that the members entered with this call; all have entered it once it is done."""
        key, latest = self._keys[channel], 0.0
        for member in members:
            start = self._find(member, key)
            if start is not None:
                entry = start + _CHANNEL.size + number % _RING * _ENTRY.size
                count, _, _, due_s = _ENTRY.unpack_from(self._map, entry)
                if count == number + 1:
                    latest = max(latest, due_s)
        return latest

    def waiting(self, *call: object) -> _Waiting:
        """A context: in it, this rank waits. `call` is (what, where, peers, channel, number)."""
        return _Waiting(self, call)

    def _same(self, rank: int, key: int, place: int, entry: bytes) -> bool:
        """Whether another rank's call is like my `entry`, or not there: not made yet, or overwritten long ago."""
        start = self._theirs.get((rank, key)) or self._find(rank, key)
        if start is None:
            return True
        theirs = self._map[start + place : start + place + len(entry)]
        return theirs == entry or theirs[: _NUMBER.size] != entry[: _NUMBER.size]

    def _find(self, rank: int, key: int) -> int | None:
        """Where a channel of another rank begins."""
        found = self._theirs.get((rank, key))
        if found is None:
            for i in range(_CHANNELS):
                start = rank * _ROW_BYTES + _HEAD_BYTES + i * _CHANNEL_BYTES
                name, _ = _CHANNEL.unpack_from(self._map, start)
                if name == key + 1:
                    found = self._theirs[rank, key] = start
                if name in (0, key + 1):
                    break
        return found

    # ---- what the process that started the ranks reads ----

    def read(self, rank: int) -> tuple[int, int, object]:
        """State, number of moves so far, and what the rank said with its state."""
        row = rank * _ROW_BYTES
        state, moves, length = _HEAD.unpack_from(self._map, row)
        start = row + _HEAD.size
        try:
            return state, moves, marshal.loads(self._map[start : start + length])
        except (EOFError, ValueError, TypeError):  # read while it was written: it moved, so nobody needs the text
            return state, moves, None

    def moves(self) -> list[int]:
        """How often each rank has moved."""
        return [_HEAD.unpack_from(self._map, rank * _ROW_BYTES)[1] for rank in range(self.world_size)]

    def all_wait(self) -> bool:
        """Every rank that is not finished waits, and at least one does."""
        states = [_HEAD.unpack_from(self._map, rank * _ROW_BYTES)[0] for rank in range(self.world_size)]
        return WAITING in states and all(s in (WAITING, FINISHED) for s in states)

    def report(self) -> str:
        """For each rank one line: what it waits for and where; then the circle, if there is one."""
        lines, waits_for = [], {}
        for rank in range(self.world_size):
            state, _, call = self.read(rank)
            if state != WAITING or call is None:
                said = {STARTING: "is starting", WAITING: "waits", FINISHED: "has finished", FAILED: "has failed"}
                lines.append((f"rank {rank}", said.get(state, "computes"), ""))
                continue
            what, where, peers, channel, number = call
            late = [p for p in peers if p != rank and self._behind(p, channel, number)]
            waits_for[rank] = late
            text = f"waits in {what}"
            if late and len(peers) > 1:
                text += f": {'ranks' if len(late) > 1 else 'rank'} {_and(late)} did not call it"
            lines.append((f"rank {rank}", text, where))
        width = max(len(text) for _, text, _ in lines)
        out = [f"  {name}  {text:<{width}}  {where}".rstrip() for name, text, where in lines]
        circle = _circle(waits_for)
        if circle:
            out.append("  the circle: " + ", ".join(f"{a} waits for {b}" for a, b in circle))
        for rank in range(self.world_size):
            note = _text(self._map[rank * _ROW_BYTES + _NOTE : rank * _ROW_BYTES + _HEAD_BYTES])
            if note:
                out.append(
                    f"  rank {rank} caught this error before, and went on:\n    " + note.replace("\n", "\n    ")
                )
        return "\n".join(out)

    def _behind(self, rank: int, channel: str, number: int) -> bool:
        key = zlib.crc32(channel.encode())
        start = self._find(rank, key)
        return start is None or _CHANNEL.unpack_from(self._map, start)[1] <= number


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


class _Waiting:
    """Written out, as it stands on every call's way: a generator would take three times as long."""

    __slots__ = ("table", "call")

    def __init__(self, table: CallTable, call: tuple) -> None:
        self.table, self.call = table, call

    def __enter__(self) -> None:
        self.table.state(WAITING, self.call)

    def __exit__(self, *error: object) -> None:
        self.table.state(RUNNING)


def _and(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + " and " * (len(ranks) > 1) + str(ranks[-1])


def _mismatch(number: int, sides: dict[int, tuple[str, str]]) -> str:
    width = max(len(what) for what, _ in sides.values())
    rows = [f"  rank {rank}  {what:<{width}}  {where}".rstrip() for rank, (what, where) in sorted(sides.items())]
    return "\n".join(
        [
            f"ranks {_and(sorted(sides))} disagree: their call number {number + 1} in this group is not the same.",
            *rows,
            "  Every rank of a group makes the same calls, in the same order, with the same shape and dtype.",
        ]
    )


def _circle(waits_for: dict[int, list[int]]) -> list[tuple[int, int]]:
    """The first circle of ranks that wait for each other, as pairs, or []."""
    dead_ends: set[int] = set()

    def walk(path: list[int]) -> list[int]:
        for peer in waits_for.get(path[-1], ()):
            if peer in path:
                return path[path.index(peer) :]
            if peer not in dead_ends and (found := walk([*path, peer])):
                return found
        dead_ends.add(path[-1])
        return []

    circle = next(filter(None, (walk([rank]) for rank in waits_for)), [])
    return list(zip(circle, circle[1:] + circle[:1], strict=True))


def where() -> str:
    """The caller's own line, outside this library and torch: `Cell In[5], line 3, in step: comm.send(...)`."""
    frame, inside = sys._getframe(1), None
    while frame is not None and _is_library(frame.f_code.co_filename):
        if inside is None and frame.f_code.co_filename not in _MACHINE:
            inside = frame  # a program of the library itself, as `lib.train`: then the line that called the machine
        frame = frame.f_back
    frame = frame or inside or sys._getframe(1)
    place = frame.f_code, frame.f_lineno
    text = _places.get(place)
    if text is None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(file, line).strip()
        if len(source) > 100:
            source = source[:99] + "…"
        text = f"{short(file)}, line {line}, in {frame.f_code.co_name}" + (f": {source}" if source else "")
        _places[place] = text
    return text


_places: dict[tuple, str] = {}  # (code, line) -> how to say it
_library: dict[str, bool] = {}


def _is_library(file: str) -> bool:
    known = _library.get(file)
    if known is None:
        known = _library[file] = file.startswith((_HERE, "<frozen", "<string>", *_LIBRARIES))
    return known


cells: dict[str, str] = {}  # file name of a notebook cell -> how to call it, set by launch


def short(file: str) -> str:
    """A file as a reader knows it: `Cell In[5]`, `lib/comm.py`, `train.py`."""
    if file in cells:
        return cells[file]
    for root in (*_LIBRARIES, os.path.join(os.path.dirname(_HERE[:-1]), "")):
        if file.startswith(root):
            return os.path.relpath(file, root)
    return os.path.basename(file)
