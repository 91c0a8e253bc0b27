"""The call table: the latest calls of every rank, in shared memory.

The problem: in a collective every rank must make the same call. If one does not, gloo hangs for thirty minutes, aborts
a process, or adds an int32 to a float32 without an error. The process that hangs cannot report why: the cause is a call
that a *different* process did not make.
The idea: the ranks of one machine share a file in memory. Each writes its next call there before it makes it. The rank
that comes later to the same call compares; a difference raises an error that shows both calls. When nothing moves, the
process that started the ranks reads which rank waits for which. Under torchrun, where ranks share no memory, each has a
table of its own, and compares nothing. Nothing here knows torch. A call costs a few microseconds (`make bench`).
"""

from __future__ import annotations

import marshal
import mmap
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from lib.runtime.hang import RUNNING, WAITING, Row, View, key_of, named_ranks

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
        path: file to map, the same for all ranks of a run; None for the row of this rank alone.
        world_size: number of ranks.
        rank: the row to write, or None for the process that only reads.
    """

    def __init__(self, path: str | None, world_size: int, rank: int | None = None) -> None:
        if rank is None:
            with open(path, "wb") as file:
                file.truncate(world_size * _ROW_BYTES)  # sparse: only written pages take memory
                for row in range(world_size):  # now: on a full disk, reading a page later would end this process
                    file.seek(row * _ROW_BYTES)
                    file.write(bytes(_HEAD_BYTES))
        if path is None:
            self._map, rows = mmap.mmap(-1, _ROW_BYTES), [rank]
        else:
            with open(path, "r+b") as file:
                self._map, rows = mmap.mmap(file.fileno(), 0), range(world_size)
        self._rows = {rank: i * _ROW_BYTES for i, rank in enumerate(rows)}
        self.rank, self._row = rank, self._rows.get(rank)
        self._moves = 0
        self._mine: dict[int, int] = {}  # channel key -> offset in my row
        self._theirs: dict[tuple[int, int], int] = {}  # (rank, channel key) -> offset in the map
        self._calls: dict[int, int] = {}
        self._waits: list[Waiting] = []  # calls that my threads wait in

    def close(self) -> None:
        self._map.close()

    # ---- written by a rank ----

    def state(self, state: int, body: bytes = b"") -> None:
        """Write this rank's state, and the dumped call that it waits in; each call counts as a move."""
        start, self._moves = self._row + _HEAD.size, self._moves + 1
        self._map[start : start + len(body)] = body
        _HEAD.pack_into(self._map, self._row, state, self._moves, len(body), time.monotonic())

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        """Enter this rank's next call on `channel`, compare it with the `members` that already made theirs, return its
        number.

        A refused call does not count: code that catches the error may then make the right call. `due_s` is when this
        rank's emulated link finishes the call (`lib.runtime.transfer`).

        Raises:
            MismatchError: a member made a different call of the same number.
        """
        key = key_of(channel)
        number = self._calls.get(key, 0)
        offset = self._mine.get(key)
        if offset is None:
            offset = self._mine[key] = self._place(key, number)
        place = _place_of(number)
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
        found, place = [self._find(member, key_of(channel)) for member in members], _place_of(number)
        entries = [_ENTRY.unpack_from(self._map, start + place) for start in found if start is not None]
        return max((due_s for count, _, _, due_s in entries if count == number + 1), default=0.0)

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
        if known is None or _NUMBER.unpack_from(self._map, known)[0] != key + 1:
            known = next((start for start, of, _ in self._channels(rank) if of == key), None)
            if known is not None:
                self._theirs[rank, key] = known
        return known

    def _channels(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Of each channel of a rank: where it begins in the map, its key, its calls so far."""
        for i in range(_CHANNELS if rank in self._rows else 0):
            start = self._rows[rank] + _HEAD_BYTES + i * _CHANNEL_BYTES
            name, calls = _CHANNEL.unpack_from(self._map, start)
            if name == 0:
                break
            yield start, name - 1, calls

    # ---- read by the process that started the ranks ----

    def row(self, rank: int) -> Row:
        """What a rank wrote last."""
        start = self._rows[rank] + _HEAD.size
        state, moves, length, since_s = _HEAD.unpack_from(self._map, self._rows[rank])
        call = None
        with suppress(EOFError, ValueError, TypeError):  # read during a write: the rank moved, the text is not needed
            call = marshal.loads(self._map[start : start + length])
        calls = {key: calls for _, key, calls in self._channels(rank)}
        return Row(state, moves, call, time.monotonic() - since_s, calls)

    def heads(self) -> list[tuple[int, int]]:
        """The state of each rank, and how many moves it made."""
        return [_HEAD.unpack_from(self._map, start)[:2] for start in self._rows.values()]

    def view(self) -> View:
        """All ranks, as they are now."""
        notes = {rank: _text(self._map[at + _NOTE : at + _HEAD_BYTES]) for rank, at in self._rows.items()}
        rows = {rank: self.row(rank) for rank in self._rows}
        return View.of(rows, caught={rank: note for rank, note in notes.items() if note})


def _place_of(number: int) -> int:
    """Where in a channel a call stands."""
    return _CHANNEL.size + number % _RING * _ENTRY.size


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


class Waiting:
    """The context of `CallTable.waiting`; each call enters it, and a generator would take three times as long."""

    __slots__ = ("table", "body")

    def __init__(self, table: CallTable, call: tuple) -> None:
        body = marshal.dumps(call)
        self.table, self.body = table, body if len(body) <= _NOTE - _HEAD.size else b""

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


def _mismatch(number: int, sides: dict[int, tuple[str, str]]) -> str:
    width = max(len(what) for what, _ in sides.values())
    rows = [f"  rank {rank}  {what:<{width}}  {where}".rstrip() for rank, (what, where) in sorted(sides.items())]
    begin = f"{named_ranks(sorted(sides))} disagree: their call number {number + 1} in this group differs."
    end = "  Every rank of a group must make the same calls, in the same order, with the same shape and dtype."
    return "\n".join([begin, *rows, end])
