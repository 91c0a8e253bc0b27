"""The results of a jail, as bytes: untrusted data.

The problem: a student's code may take over the process that sends, and then a pickle of a few bytes could run code,
or fill the grader's memory. The idea: `torch.save` writes a zip of one small pickle and one record for each tensor. The
grader reads only such a zip, with records that have the same size in memory, and allows the pickle only tensors,
numbers, strings, lists and dicts.
"""

from __future__ import annotations

import dataclasses
import io
import zipfile
from typing import Any

import torch

from course.check.compare import Data, plain
from course.check.running import FAIL, TODO, NoAnswer

MOST_BYTES = 64 * 2**20  # of all results of the ranks of one case
MOST_ITEMS = 10**6  # of all lists and dicts in it
MOST_WORDS = 20_000  # letters of the hint to an answer that returned nothing
_PACKED = b"\nbytearray\n"  # a pickle with this may make a gigabyte out of a few bytes


def pack(outcomes: list[list[Data] | NoAnswer]) -> bytes:
    """The bytes to send; above `MOST_BYTES`, a sentence instead of each outcome."""
    raw = _saved([_plain_outcome(got) for got in outcomes])
    return raw if len(raw) <= MOST_BYTES else _saved([f"more than {MOST_BYTES >> 20} MB"] * len(outcomes))


def _saved(thing: list) -> bytes:
    torch.save(thing, file := io.BytesIO())
    return file.getvalue()


def _plain_outcome(got: list[Data] | NoAnswer) -> Any:
    if isinstance(got, NoAnswer):
        return dataclasses.asdict(got)
    return [{str(name): plain(value) for name, value in data.items()} for data in got]


def unpack(raw: bytes, answers: int, ranks: int) -> list[list[Data] | NoAnswer]:
    """The outcomes in the bytes of a jail. The bytes may be forged: they make no object of a class, and no large one.

    Args:
        raw: the bytes.
        answers: how many outcomes there must be.
        ranks: how many results each must have.

    Raises:
        Exception: of many kinds, because the bytes may have any fault.
    """
    # torch and zipfile look for the records in the same place only if a zip begins and ends as `torch.save` writes it.
    if raw[:4] != b"PK\3\4" or raw[-22:-18] != b"PK\5\6" or _PACKED in raw:
        raise ValueError("torch.save did not write it")
    records = zipfile.ZipFile(io.BytesIO(raw)).infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in records):
        raise ValueError("it is compressed")
    if sum(one.file_size for one in records) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MB")
    found = torch.load(io.BytesIO(raw), weights_only=True)
    _must_be_small(found)
    if not isinstance(found, list) or len(found) != answers:
        raise ValueError("the number of outcomes is not the number of answers")
    return [_outcome(x, ranks) for x in found]


def _must_be_small(found: Any) -> None:
    """A list may hold the same list many times, and a tensor of one element may have a large shape."""
    items, n_bytes, left = 0, 0, [found]
    while left:
        x = left.pop()
        if isinstance(x, torch.Tensor):
            n_bytes += x.numel() * x.element_size()
        elif isinstance(x, (dict, list, tuple)):
            items += len(x)
            left += [*x.keys(), *x.values()] if isinstance(x, dict) else x
        if items > MOST_ITEMS or n_bytes > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MB, or than {MOST_ITEMS:,} items")


def _outcome(x: Any, ranks: int) -> list[Data] | NoAnswer:
    if isinstance(x, str):
        raise ValueError(x)
    if isinstance(x, dict):
        if x["status"] not in (FAIL, TODO) or not all(isinstance(x[text], str) for text in ("hint", "stuck")):
            raise ValueError("not a verdict")
        words = (x[text][:MOST_WORDS] for text in ("hint", "stuck"))
        return NoAnswer(x["status"], *words, fault=x["fault"] is True, slow=x["slow"] is True)
    if not isinstance(x, list) or len(x) != ranks or not all(isinstance(data, dict) for data in x):
        raise ValueError("not the results of ranks")
    return x
