"""What ranks print: written down in the rank, shown by the process that started it.

The problem: four ranks that print at once make a salad, and one that prints a million lines fills the disk and chokes
the notebook, which must store all of it.
The idea: each rank writes to a file of its own, its share and no more, and remembers the last lines. The process that
started them shows rank 0's as they come, the others' at the end, in rank order, and says whose each line is.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import sys

from lib.runtime import headroom

MOST_BYTES = 4 * headroom.MB  # that the ranks of a run may print together; more, and a browser gets slow
_LAST_BYTES = 2000  # of what is left out, the end


class Writer(io.RawIOBase):
    """A file that takes the first `most_bytes` and, when it is closed, the last lines.

    Args:
        path: file to write.
        most_bytes: how much it takes.
        whose: who prints, as the sentence at the cut says it.
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
            sentence = (
                f"... cut here: {self._whose} has printed {headroom.size_text(self._most_bytes)}, its share ...\n"
            )
            in_line = (kept or self._last)[-1:] not in b"\r\n"
            self._file.write(kept + b"\n" * in_line + sentence.encode())
            data, self._last = data[len(kept) :], b""
        self._out_bytes += len(data)
        self._last = (self._last + bytes(data[-_LAST_BYTES:]))[-_LAST_BYTES:]
        return size

    def finish(self) -> None:
        """Say how much was left out, and how it ended."""
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
    """Shows what the ranks of one run print.

    Args:
        folder: where their files are, `out0` and on.
        world_size: number of ranks.
    """

    def __init__(self, folder: str, world_size: int) -> None:
        self._folder, self._size = folder, world_size
        self._shown_bytes = 0  # of rank 0's file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_line_start = True

    def show_rank_0(self) -> None:
        """What rank 0 has printed since this was last asked."""
        _show(self._rank_0())

    def show_all(self) -> None:
        """The rest of rank 0's, then the others', in one piece: a notebook stores one output."""
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
        """The text, each line beginning with whose it is; it comes after what was labelled before."""
        if not text:
            return ""
        goes_on = rank == 0 and not self._at_line_start
        start = r"(?<=[\n\r])(?=[^\n\r])" if goes_on else r"(?:^|(?<=[\n\r]))(?=[^\n\r])"
        before = "" if self._at_line_start or goes_on else "\n"
        self._at_line_start = text[-1] in "\n\r"
        return before + re.sub(start, f"rank {rank} | ", text)


def _show(text: str) -> None:
    if text and sys.stdout is not None and not getattr(sys.stdout, "closed", False):  # as the caller has chosen
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
