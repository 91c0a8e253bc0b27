"""Checksums of the files of a checkpoint, in one more file: a line for each, with its CRC-32.

The problem: a disk may flip a bit, or a copy end early or mix up two files, and DCP loads what it finds.
The idea: the thread that writes a file reads it again, and notes its checksum while training continues. Before a file
is used, one rank compares it. Both take as long as reading at 0.5 to 3 GB/s.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping

from lib.checkpoint.settings import CheckpointError, reason

CHECKSUMS = "checksums"


def checksum(folder: str, name: str) -> str:
    """The CRC-32 of a file, in hexadecimal digits."""
    crc = 0
    with open(os.path.join(folder, name), "rb") as file:
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def note_checksums(folder: str, sums: Mapping[str, str]) -> None:
    """Append lines to the list of checksums, on the disk."""
    with open(os.path.join(folder, CHECKSUMS), "a", encoding="utf-8") as file:
        file.writelines(f"{each} {name}\n" for name, each in sums.items())
        file.flush()
        os.fsync(file.fileno())


def check_files(folder: str, names: Iterable[str]) -> None:
    """Compare files with their checksums.

    Raises:
        CheckpointError: one differs, or is missing.
    """
    try:
        with open(os.path.join(folder, CHECKSUMS), encoding="utf-8") as file:
            sums = {name: each for each, name in map(str.split, file)}
        bad = next((name for name in names if sums.get(name) != checksum(folder, name)), None)
    except (OSError, ValueError) as error:  # a line without two words, a byte that is no text
        raise CheckpointError(f"{folder} cannot be compared with its {CHECKSUMS}: {reason(error)}") from None
    if bad:
        raise CheckpointError(f"{bad} of {folder} is damaged: its content differs from its line in {CHECKSUMS}")
