"""Output of the ranks: written to files in the rank, shown by the process that started it.

The problem: four ranks that print at the same time mix their lines. A rank that prints a million lines fills the disk
and the notebook, which must store all of them.
The idea: each rank writes its lines, labelled, to a file, and when that is full to a second one, which keeps the last
lines. The process that started the ranks shows rank 0's first file as it grows, and the rest at the end, in rank order.
"""

import codecs
import contextlib
import io
import os
import re
import sys

from lib.runtime import headroom

FIRST_BYTES, LAST_BYTES = 8000, 6000  # kept of a rank's output; up to twice the last, before some of it is left out
BAR_BYTES = 500_000  # of the progress bars of rank 0, which a screen replaces by the next


class Writer(io.RawIOBase):
    """Two files with the output of a rank: `path` takes the first bytes, `path` + "end" keeps the last lines."""

    def __init__(self, path: str, rank: int) -> None:
        self._label = f"rank {rank} | ".encode()
        self._first, self._end = open(path, "wb", buffering=0), open(f"{path}end", "wb", buffering=0)
        self._left_bytes, self._bar_bytes = FIRST_BYTES, BAR_BYTES * (rank == 0)
        self._last, self._out_bytes = bytearray(), 0
        self._before, self._gap = b"\n", b""  # the last letter printed; what ends the last line of the first file

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        data = bytes(data)
        lines = self._before + data  # a label comes before the first letter of a line
        text = re.sub(rb"(?<=[\n\r])(?=[^\n\r])", self._label, lines)[1:]
        self._before = lines[-1:]
        if self._left_bytes and b"\r" in text and len(text) <= self._bar_bytes:
            self._bar_bytes -= len(text)
            self._write_first(text)
        else:
            self._keep(text)
        return len(data)

    def _write_first(self, text: bytes) -> None:
        self._first.write(text)
        self._gap = self._gap if not text else b"" if text[-1:] in b"\r\n" else b"\n"

    def _keep(self, text: bytes) -> None:
        if self._left_bytes:
            fits = text if len(text) <= self._left_bytes else text[: text.rfind(b"\n", 0, self._left_bytes) + 1]
            if not fits and len(text) > LAST_BYTES:  # a line without end
                fits = text[: self._left_bytes].decode(errors="ignore").encode()
            self._write_first(fits)
            text = text[len(fits) :]
            self._left_bytes = 0 if text else self._left_bytes - len(fits)
        self._last += text
        if len(self._last) <= 2 * LAST_BYTES:
            self._end.write(text)
            return
        most = len(self._last) - LAST_BYTES
        cut = self._last.find(b"\n", most - 1, -1) + 1 or most
        self._out_bytes += cut - len(self._label) * self._last.count(self._label, 0, cut)
        in_line = self._last[cut - 1 : cut] != b"\n"
        del self._last[:cut]
        sentence = b"%s... %s left out ...\n" % (self._label, headroom.size_text(self._out_bytes).encode())
        self._end.seek(0)
        self._end.truncate()
        self._end.write(self._gap + sentence + self._label * in_line + self._last)


class Reader:
    """Shows the output of the ranks of one run, from their files `out0`, `out1`, … in a folder."""

    def __init__(self, folder: str, world_size: int) -> None:
        self._folder, self._size = folder, world_size
        self._shown_bytes, self._last = 0, "\n"  # of rank 0's first file; the last letter shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show_rank_0(self) -> None:
        """Show what is new in the first file of rank 0."""
        _show(self._rank_0())

    def show_all(self) -> None:
        """Show the rest of rank 0's lines, then the other ranks', in one piece: a notebook stores one output."""
        text = self._rank_0() + self._decoder.decode(self._read("out0end"))
        for rank in range(1, self._size):
            lines = (self._read(f"out{rank}") + self._read(f"out{rank}end")).decode(errors="replace")
            text += "\n" * (lines > "" and (text or self._last)[-1] not in "\n\r") + lines
        _show(text)

    def _rank_0(self) -> str:
        new = self._read("out0", self._shown_bytes)
        self._shown_bytes += len(new)
        text = self._decoder.decode(new)
        self._last = (self._last + text)[-1]
        return text

    def _read(self, name: str, start: int = 0) -> bytes:
        with contextlib.suppress(OSError), open(os.path.join(self._folder, name), "rb") as file:
            file.seek(start)
            return file.read()
        return b""


def _show(text: str) -> None:
    if text and sys.stdout is not None and not getattr(sys.stdout, "closed", False):  # the caller may have closed it
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
