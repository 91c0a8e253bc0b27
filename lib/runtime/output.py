"""Output of the ranks: written to files in the rank, shown by the process that started it.

The problem: four ranks that print at the same time mix their lines. A rank that prints a million lines fills the disk
and slows down the notebook, which must store all of them.
The idea: each rank writes to its own file, up to its share, and keeps the last lines. The process that started the
ranks shows the lines of rank 0 as they come and those of the other ranks at the end, in rank order, labelled with the
rank.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import sys

from lib.runtime import headroom

MOST_BYTES = 4 * headroom.MB  # that the ranks of a run may print together; more makes a browser slow
_LAST_BYTES = 2000  # kept from the end of the omitted output


class Writer(io.RawIOBase):
    """A file that takes the first `most_bytes` and, when it is closed, the last lines.

    Args:
        path: file to write.
        most_bytes: its limit.
        whose: the rank's name in the sentence at the cut.
    """

    def __init__(self, path: str, most_bytes: int, whose: str) -> None:
        self._file = open(path, "wb", buffering=0)
        self._left_bytes, self._most_bytes, self._whose = most_bytes, most_bytes, whose
        self._out_bytes, self._last = 0, b"\n"

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        size = len(data)
        if not size:
            return 0
        if not self._out_bytes:
            if size <= self._left_bytes:
                self._left_bytes -= size
                self._file.write(data)
                self._last = bytes(data[-1:])
                return size
            data = bytes(data)
            kept = data[: data.rfind(b"\n", 0, self._left_bytes) + 1]
            if not kept and size > _LAST_BYTES:  # a line without end
                kept = data[: self._left_bytes]
            share = headroom.size_text(self._most_bytes)
            sentence = f"... cut here: {self._whose} has printed {share}, its share ...\n"
            in_line = (kept or self._last)[-1:] not in b"\r\n"
            self._file.write(kept + b"\n" * in_line + sentence.encode())
            data, self._last = data[len(kept) :], b""
        self._out_bytes += len(data)
        self._last = (self._last + bytes(data[-_LAST_BYTES:]))[-_LAST_BYTES:]
        return size

    def finish(self) -> None:
        """Write how much was left out, and the last lines."""
        if self._out_bytes:
            _, newline, lines = self._last.partition(b"\n")
            last = lines if newline and lines else self._last
            left_out = self._out_bytes - len(last)
            self._file.write(f"... {headroom.size_text(left_out)} left out; the last lines: ...\n".encode() + last)
            self._out_bytes, self._left_bytes = 0, 0


def shares(world_size: int) -> int:
    """Bytes that each rank may print."""
    return MOST_BYTES // world_size


class Reader:
    """Shows the output of the ranks of one run.

    Args:
        folder: folder of their files `out0`, `out1`, …
        world_size: number of ranks.
    """

    def __init__(self, folder: str, world_size: int) -> None:
        self._folder, self._size = folder, world_size
        self._shown_bytes = 0  # of rank 0's file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_line_start = True

    def show_rank_0(self) -> None:
        """Show the lines that rank 0 printed since the last call."""
        _show(self._rank_0())

    def show_all(self) -> None:
        """Show the rest of rank 0's lines, then the other ranks', in one piece: a notebook stores one output."""
        others = (self._labelled(rank, self._read(rank).decode(errors="replace")) for rank in range(1, self._size))
        _show(self._rank_0() + "".join(others))

    def _rank_0(self) -> str:
        new = self._read(0, self._shown_bytes)
        self._shown_bytes += len(new)
        return self._labelled(0, self._decoder.decode(new))

    def _read(self, rank: int, start: int = 0) -> bytes:
        with contextlib.suppress(OSError), open(os.path.join(self._folder, f"out{rank}"), "rb") as file:
            file.seek(start)
            return file.read()
        return b""

    def _labelled(self, rank: int, text: str) -> str:
        """The text with the rank's label before each line; it continues the text labelled earlier."""
        if not text:
            return ""
        goes_on = rank == 0 and not self._at_line_start
        start = r"(?<=[\n\r])(?=[^\n\r])" if goes_on else r"(?:^|(?<=[\n\r]))(?=[^\n\r])"
        before = "" if self._at_line_start or goes_on else "\n"
        self._at_line_start = text[-1] in "\n\r"
        return before + re.sub(start, f"rank {rank} | ", text)


def _show(text: str) -> None:
    if text and sys.stdout is not None and not getattr(sys.stdout, "closed", False):  # the caller may have closed it
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
