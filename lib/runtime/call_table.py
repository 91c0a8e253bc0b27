"""The call table: the latest calls of every rank, in shared memory.

The problem: in a collective every rank must make the same call. If one does not, gloo hangs for thirty minutes, aborts
a process, or adds an int32 to a float32 without an error. The process that hangs cannot report why: the cause is a call
that a *different* process did not make.

The idea: the ranks of one machine share a file in memory. Each rank writes its next call there before it makes it. The
rank that comes later to the same call compares; a difference raises an error that shows both calls. When nothing moves,
the process that started the ranks reads the table and reports which rank waits for which.

Nothing here knows torch. A call costs a few microseconds (`make bench`).
"""

from __future__ import annotations

import marshal
import mmap
import struct
import time
from collections.abc import Sequence

from lib.runtime.hang import FINISHED, RUNNING, WAITING, AwaitedCall, View, key_of, named_ranks

# Native layouts: eight bytes are written in one piece, so no process reads half a number.
_HEAD = struct.Struct("QQId")  # state, moves, length of the text, time of the state
_NOTE, _HEAD_BYTES = 1024, 2048  # where the text of a refused call begins and ends
_CHANNELS, _RING, _TEXT = 160, 64, 184
_CHANNEL = struct.Struct("QQ")  # key + 1, calls so far
_ENTRY = struct.Struct(f"Q{_TEXT}s{_TEXT}sd")  # number of the call + 1, call, place, due_s
_NUMBER = struct.Struct("Q")
_CHANNEL_BYTES = _CHANNEL.size + _RING * _ENTRY.size
_ROW_BYTES = _HEAD_BYTES + _CHANNELS * _CHANNEL_BYTES


class MismatchError(RuntimeError):
    """Two ranks of a group made different calls where they must make the same call."""


class CallTable:
    """One row per rank: its state, the call it waits in, and its latest calls on each channel.

    A channel is a process group, or the direction `src > dst` of two of its ranks. Each rank numbers its calls on a
    channel; call k must be the same on all its ranks. A row has place for the channels that were used last.

    Args:
        path: file to map, the same for all ranks of a run.
        world_size: number of rows.
        rank: the row to write, or None for the process that only reads.
    """

    def __init__(self, path: str, world_size: int, rank: int | None = None) -> None:
        if rank is None:
            with open(path, "wb") as file:
                file.truncate(world_size * _ROW_BYTES)  # sparse: only written pages take memory
                for row in range(world_size):  # now: on a full disk, reading a page later would end this process
                    file.seek(row * _ROW_BYTES)
                    file.write(bytes(_HEAD_BYTES))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.world_size, self.rank = world_size, rank
        self._row = (rank or 0) * _ROW_BYTES
        self._moves = 0
        self._mine: dict[int, int] = {}  # channel key -> offset in my row
        self._theirs: dict[tuple[int, int], int] = {}  # (rank, channel key) -> offset in the map
        self._keys: dict[str, int] = {}
        self._calls: dict[int, int] = {}
        self._waits: list[Waiting] = []  # calls that my threads wait in
        self._said = b""  # the text written last

    def close(self) -> None:
        self._map.close()

    # ---- written by a rank ----

    def state(self, state: int, body: bytes = b"") -> None:
        """Write this rank's state, and the dumped call that it waits in; each call counts as a move."""
        if body and body is not self._said:
            start = self._row + _HEAD.size
            self._map[start : start + len(body)] = body
            self._said = body
        self._moves += 1
        _HEAD.pack_into(self._map, self._row, state, self._moves, len(body), time.monotonic())

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        """Enter this rank's next call on `channel`, compare it with the `members` that already made theirs, return its
        number.

        A refused call does not count: code that catches the error may then make the right call. `due_s` is when this
        rank's emulated link finishes the call (`lib.runtime.link`).

        Raises:
            MismatchError: a member made a different call of the same number.
        """
        key = self._keys.get(channel)
        if key is None:
            key = self._keys[channel] = key_of(channel)
        number = self._calls.get(key, 0)
        offset = self._mine.get(key)
        if offset is None:
            offset = self._mine[key] = self._place(key, number)
        place = _CHANNEL.size + number % _RING * _ENTRY.size
        at = self._row + offset + place
        mine = what.encode()[:_TEXT]
        _NUMBER.pack_into(self._map, at, 0)  # first the texts, then the number that makes them valid
        _ENTRY.pack_into(self._map, at, 0, mine, where.encode()[:_TEXT], due_s)
        _NUMBER.pack_into(self._map, at, number + 1)
        _CHANNEL.pack_into(self._map, self._row + offset, key + 1, number + 1)
        entry = self._map[at : at + _NUMBER.size + len(mine) + (len(mine) < _TEXT)]  # with its final zero byte
        for peer in members:
            if peer == self.rank or self._same(peer, key, place, entry):
                continue
            time.sleep(0.001)  # perhaps it was read during a write: look again
            if not self._same(peer, key, place, entry):
                start = self._find(peer, key) + place
                _, theirs, line, _ = _ENTRY.unpack_from(self._map, start)
                text = _mismatch(number, {self.rank: (what, where), peer: (_text(theirs), _text(line))})
                note = text.encode()[: _HEAD_BYTES - _NOTE]
                self._map[self._row + _NOTE : self._row + _NOTE + len(note)] = note
                _CHANNEL.pack_into(self._map, self._row + offset, key + 1, number)  # the others still wait for it
                raise MismatchError(text)
        self._calls[key] = number + 1
        return number

    def calls(self) -> dict[int, int]:
        """How many calls this rank made on each channel, by its key."""
        return dict(self._calls)

    def due_s(self, channel: str, number: int, members: Sequence[int]) -> float:
        """The latest `due_s` that the members entered with this call; once it is done, all have entered theirs."""
        key, latest = self._keys[channel], 0.0
        for member in members:
            start = self._find(member, key)
            if start is not None:
                entry = start + _CHANNEL.size + number % _RING * _ENTRY.size
                count, _, _, due_s = _ENTRY.unpack_from(self._map, entry)
                if count == number + 1:
                    latest = max(latest, due_s)
        return latest

    def waiting(self, *call: object) -> Waiting:
        """A reusable context: inside it, this rank waits in `call`: (what, where, peers, channel, number)."""
        return Waiting(self, call)

    def _place(self, key: int, number: int) -> int:
        """Where in my row a new channel begins: behind the others, or, in a full row, in the place of the oldest."""
        if len(self._mine) < _CHANNELS:
            return _HEAD_BYTES + len(self._mine) * _CHANNEL_BYTES
        offset = self._mine.pop(next(iter(self._mine)))
        start = self._row + offset + _CHANNEL.size
        _CHANNEL.pack_into(self._map, self._row + offset, key + 1, number)
        self._map[start : start + _RING * _ENTRY.size] = bytes(_RING * _ENTRY.size)
        return offset

    def _same(self, rank: int, key: int, place: int, entry: bytes) -> bool:
        """Whether a rank's call equals `entry`, or cannot be compared: not made yet, or already overwritten."""
        start = self._find(rank, key)
        if start is None:
            return True
        theirs = self._map[start + place : start + place + len(entry)]
        return theirs == entry or theirs[: _NUMBER.size] != entry[: _NUMBER.size]

    def _find(self, rank: int, key: int) -> int | None:
        """Where a rank's channel begins in the map; None if it has no such channel."""
        known = self._theirs.get((rank, key))
        if known is not None and _NUMBER.unpack_from(self._map, known)[0] == key + 1:
            return known
        for i in range(_CHANNELS):
            start = rank * _ROW_BYTES + _HEAD_BYTES + i * _CHANNEL_BYTES
            (name,) = _NUMBER.unpack_from(self._map, start)
            if name == key + 1:
                self._theirs[rank, key] = start
                return start
            if name == 0:
                break
        return None

    # ---- read by the process that started the ranks ----

    def read(self, rank: int) -> tuple[int, int, object, float]:
        """State of a rank, its moves so far, the call it wrote with the state, and the time of that."""
        row = rank * _ROW_BYTES
        state, moves, length, since_s = _HEAD.unpack_from(self._map, row)
        start = row + _HEAD.size
        try:
            return state, moves, marshal.loads(self._map[start : start + length]), since_s
        except (EOFError, ValueError, TypeError):  # read during a write: the rank moved, so the text is not needed
            return state, moves, None, since_s

    def moves(self) -> list[int]:
        """How many moves each rank made."""
        return [_HEAD.unpack_from(self._map, rank * _ROW_BYTES)[1] for rank in range(self.world_size)]

    def all_wait(self) -> bool:
        """Whether every rank waits or has finished, and at least one waits."""
        states = [_HEAD.unpack_from(self._map, rank * _ROW_BYTES)[0] for rank in range(self.world_size)]
        return WAITING in states and all(s in (WAITING, FINISHED) for s in states)

    def waits(self) -> dict[int, AwaitedCall]:
        """Rank → the call it waits in, for each rank that waits."""
        found = {}
        for rank in range(self.world_size):
            state, _, call, since_s = self.read(rank)
            if state == WAITING:
                found[rank] = AwaitedCall.of(rank, call, self._calls_of, time.monotonic() - since_s)
        return found

    def view(self) -> View:
        """All ranks, as they are now."""
        starts = {rank: rank * _ROW_BYTES for rank in range(self.world_size)}
        notes = {rank: _text(self._map[at + _NOTE : at + _HEAD_BYTES]) for rank, at in starts.items()}
        states = {rank: self.read(rank)[0] for rank in starts}
        return View(states, self.waits(), {rank: note for rank, note in notes.items() if note})

    def _calls_of(self, rank: int, key: int) -> int:
        """How many calls a rank made on a channel."""
        start = self._find(rank, key)
        return 0 if start is None else _CHANNEL.unpack_from(self._map, start)[1]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


class Waiting:
    """The context of `CallTable.waiting`; each call enters it, and a generator would take three times as long."""

    __slots__ = ("table", "body")

    def __init__(self, table: CallTable, call: tuple) -> None:
        self.table, self.body = table, _dumped(call)

    def __enter__(self) -> None:
        self.table._waits.append(self)
        self.table.state(WAITING, self.body)

    def __exit__(self, *error: object) -> None:
        waits = self.table._waits
        waits.remove(self)
        if waits:  # of a different thread
            self.table.state(WAITING, waits[-1].body)
        else:
            self.table.state(RUNNING)


def _dumped(what: object) -> bytes:
    """The bytes to store in a row; empty if they do not fit."""
    body = marshal.dumps(what)
    return body if len(body) <= _NOTE - _HEAD.size else b""


def _mismatch(number: int, sides: dict[int, tuple[str, str]]) -> str:
    width = max(len(what) for what, _ in sides.values())
    rows = [f"  rank {rank}  {what:<{width}}  {where}".rstrip() for rank, (what, where) in sorted(sides.items())]
    begin = f"{named_ranks(sorted(sides))} disagree: their call number {number + 1} in this group differs."
    end = "  Every rank of a group must make the same calls, in the same order, with the same shape and dtype."
    return "\n".join([begin, *rows, end])
