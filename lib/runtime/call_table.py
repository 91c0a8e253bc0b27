"""The call table: the latest calls of every rank, in shared memory.

The problem: in a collective every rank must make the same call. If one does not, gloo hangs for thirty minutes, aborts
a process, or adds an int32 to a float32 without an error. The process that hangs cannot report why: the cause is a call
that a *different* process did not make.
The idea: the ranks of one machine share a file in memory. Each writes its next call there before it makes it. The rank
that comes later to the same call compares; a difference raises an error that shows both calls. When nothing moves, the
process that started the ranks reads which rank waits for which. Under torchrun, where ranks share no memory, each has a
table of its own (`lib.torchrun.first_calls`). Nothing here knows torch. A call costs a few microseconds (`make bench`).
"""

from __future__ import annotations

import marshal
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import Structure, c_char, c_double, c_ubyte, c_uint64, sizeof

from lib.runtime.hang import RUNNING, WAITING, Row, View, key_of, named_ranks

TEXT_BYTES = 184  # of a call and of its line: what is longer is compared up to here
_CHANNELS, _RING, _BODY, _NOTE = 160, 64, 1000, 1024
_NO_CALL = marshal.dumps(None)


class _Entry(Structure):
    """A call on a channel."""

    _fields_ = [
        ("count", c_uint64),  # calls so far, with this one: written last, so the rest is valid
        ("what", c_char * TEXT_BYTES),
        ("where", c_char * TEXT_BYTES),
        ("due_s", c_double),
    ]


class _Channel(Structure):
    _fields_ = [("key", c_uint64), ("count", c_uint64), ("ring", _Entry * _RING)]


class _Row(Structure):
    """A rank's row in memory: eight bytes are written in one piece, so no process reads half a number."""

    _fields_ = [
        ("state", c_uint64),
        ("moves", c_uint64),
        ("since_s", c_double),
        ("call", c_ubyte * _BODY),  # that it waits in, dumped by marshal
        ("note", c_char * _NOTE),  # the text of a refused call
        ("channels", _Channel * _CHANNELS),
    ]


class MismatchError(RuntimeError):
    """Two ranks of a group made different calls where they must make the same call.

    Attributes:
        ranks: the two.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)  # `pickle` makes it of this alone, and then adds the attributes
        self.ranks = tuple(ranks)


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
                file.truncate(world_size * sizeof(_Row))  # sparse: only written pages take memory
                for row in range(world_size):  # now: on a full disk, reading a page later would end this process
                    file.seek(row * sizeof(_Row))
                    file.write(bytes(_Row.channels.offset))
        memory, ranks = bytearray(sizeof(_Row)), [rank]
        if path is not None:
            with open(path, "r+b") as file:
                memory, ranks = mmap.mmap(file.fileno(), 0), range(world_size)
        self._rows = dict(zip(ranks, (_Row * len(ranks)).from_buffer(memory), strict=True))
        self.rank, self._row = rank, self._rows.get(rank)
        if rank is not None:
            begin = ranks.index(rank) * sizeof(_Row) + _Row.call.offset
            self._body = memoryview(memory)[begin : begin + _BODY]  # of `_row.call`
        self._mine: dict[int, _Channel] = {}  # by their keys
        self._theirs: dict[tuple[int, int], _Channel] = {}  # by rank and key
        self._calls: dict[int, int] = {}
        self._waits: list[Waiting] = []  # calls that my threads wait in

    def close(self) -> None:
        """Drop the memory, which is unmapped when nothing uses it."""
        self._rows, self._row, self._mine, self._theirs = {}, None, {}, {}

    # ---- written by a rank ----

    def state(self, state: int, body: bytes = _NO_CALL) -> None:
        """Write this rank's state, and the dumped call that it waits in; each call counts as a move."""
        row, self._body[: len(body)] = self._row, body
        row.state, row.moves, row.since_s = state, row.moves + 1, time.monotonic()

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        """Enter this rank's next call on `channel`, compare it with the `members` that already made theirs, return its
        number.

        A refused call does not count: code that catches the error may then make the right call. `due_s` is when this
        rank's emulated link finishes the call (`lib.runtime.emulated_link`).

        Raises:
            MismatchError: a member made a different call of the same number.
        """
        key = key_of(channel)
        number = self._calls.get(key, 0)
        mine = self._mine.get(key)
        if mine is None:
            mine = self._mine[key] = self._place(key, number)
        entry, text = mine.ring[number % _RING], what.encode()[:TEXT_BYTES]
        entry.count = 0
        entry.what, entry.where, entry.due_s = text, where.encode()[:TEXT_BYTES], due_s
        entry.count = number + 1
        mine.key, mine.count = key, number + 1
        for peer in members:
            theirs = self._entry(peer, key, number)
            if theirs is None or theirs.what == text:
                continue
            time.sleep(0.001)  # perhaps it was read during a write: look again
            if theirs.what != text and theirs.count == number + 1:
                sides = {self.rank: (what, where), peer: (_text(theirs.what), _text(theirs.where))}
                error = mismatch(number, sides)
                self._row.note = str(error).encode()[:_NOTE]
                mine.count = number  # the others still wait for it
                raise error
        self._calls[key] = number + 1
        return number

    def calls(self) -> dict[int, int]:
        """How many calls this rank made on each channel, by its key."""
        return dict(self._calls)

    def due_s(self, channel: str, number: int, members: Sequence[int]) -> float:
        """The latest `due_s` that the members entered with this call; once it is done, all have entered theirs."""
        entries = [self._entry(member, key_of(channel), number) for member in members]
        return max((entry.due_s for entry in entries if entry is not None), default=0.0)

    @property
    def waiting_threads(self) -> int:
        """How many threads of this rank wait in a call; its row shows one."""
        return len(self._waits)

    def waiting(self, *call: object) -> Waiting:
        """A reusable context: inside it, this rank waits in `call`: (what, where, peers, channel, number)."""
        return Waiting(self, call)

    def _place(self, key: int, number: int) -> _Channel:
        """Where in my row a new channel is written: behind the others, or, in a full row, in place of the oldest."""
        if len(self._mine) < _CHANNELS:
            return self._row.channels[len(self._mine)]
        place = self._mine.pop(next(iter(self._mine)))
        place.key, place.count = key, number
        place.ring = type(place.ring)()
        return place

    def _entry(self, rank: int, key: int, number: int) -> _Entry | None:
        """A rank's call of this number on a channel; None if it is not made yet, or already overwritten."""
        known = self._theirs.get((rank, key))
        if known is None or known.key != key:
            known = next((channel for channel in self._channels(rank) if channel.key == key), None)
            if known is None:
                return None
            self._theirs[rank, key] = known
        entry = known.ring[number % _RING]
        return entry if entry.count == number + 1 else None

    def _channels(self, rank: int) -> Iterator[_Channel]:
        for channel in self._rows[rank].channels if rank in self._rows else ():
            if channel.key == 0:
                break
            yield channel

    # ---- read by the process that started the ranks ----

    def row(self, rank: int) -> Row:
        """What a rank wrote last."""
        row, call = self._rows[rank], None
        with suppress(EOFError, ValueError, TypeError):  # read during a write: the rank moved, the text is not needed
            call = marshal.loads(bytes(row.call))
        calls = {channel.key: channel.count for channel in self._channels(rank)}
        return Row(row.state, row.moves, call, time.monotonic() - row.since_s, calls)

    def heads(self) -> list[tuple[int, int]]:
        """The state of each rank, and how many moves it made."""
        return [(row.state, row.moves) for row in self._rows.values()]

    def view(self) -> View:
        """All ranks, as they are now."""
        rows = {rank: self.row(rank) for rank in self._rows}
        return View.of(rows, caught={rank: _text(row.note) for rank, row in self._rows.items() if row.note})


def _text(field: bytes) -> str:
    return field.decode(errors="ignore")


class Waiting:
    """The context of `CallTable.waiting`; each call enters it, and a generator would take three times as long."""

    __slots__ = ("table", "body")

    def __init__(self, table: CallTable, call: tuple) -> None:
        body = marshal.dumps(call)
        self.table, self.body = table, body if len(body) <= _BODY else _NO_CALL

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


def mismatch(number: int, sides: dict[int, tuple[str, str]]) -> MismatchError:
    """The error for two ranks, each with its call and the line that made it."""
    width = max(len(what) for what, _ in sides.values())
    rows = [f"  rank {rank}  {what:<{width}}  {where}".rstrip() for rank, (what, where) in sorted(sides.items())]
    begin = f"{named_ranks(sorted(sides))} disagree: their call number {number + 1} in this group differs."
    end = "  Every rank of a group must make the same calls, in the same order, with the same shape and dtype."
    return MismatchError("\n".join([begin, *rows, end]), sorted(sides))
