"""One file of a trace as it was written, and which rank it is of.

The problem: files come from any PyTorch since 1.8 and from AMD's, copied by hand: cut off, without a rank, listed as a
shell does (`rank0 rank10 rank1`), with times as text. The idea: read what can be read, take the rank from the file,
else from its name, and refuse the rest in one sentence. A guess here would blame the wrong rank later.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

NAMED = re.compile(r"(?:rank|worker|proc|gpu|(?<![a-z])r)[-_.]?(\d+)", re.IGNORECASE)
OF_PYTHON = ("cpu_op", "user_annotation", "cuda_runtime")


class TraceError(ValueError):
    """A file is no trace of torch.profiler, does not say its rank, or is of the same rank as another."""


@dataclass
class Event:
    """What lasted on a thread or a stream, in ns of the clock of its host."""

    name: str
    category: str  # in small letters: kernel, cpu_op, cuda_runtime, user_annotation ...
    thread: object
    start_ns: int
    end_ns: int
    args: Mapping[str, object]


@dataclass
class File:
    """A file of one rank.

    Args:
        path: for messages.
        rank: None if neither the file nor its name says it.
        world: how many ranks the run has; 0 if the file does not say it.
        host: "" if it does not say it; ranks of a host share a clock.
        process: the number of the process of Python; None if the file has only a GPU.
        groups: name of a process group → its description and ranks.
        events: in the order of their start.
    """

    path: str
    rank: int | None
    world: int
    host: str
    process: object
    groups: dict[str, tuple[str, tuple[int, ...]]]
    events: list[Event]

    @property
    def least_world(self) -> int:
        """How many ranks the run had at least: the file may say it, or name ranks."""
        named = (rank for _, ranks in self.groups.values() for rank in ranks)
        return max(self.world, 1 + max([self.rank or 0, *named]))

    @property
    def window(self) -> tuple[int, int]:
        """Its first start and its last end, in ns."""
        if not self.events:
            return 0, 0
        return self.events[0].start_ns, max(event.end_ns for event in self.events)


def read_file(path: str | PathLike[str], data: Mapping) -> File:
    """What the content of a file says of its rank. Raises TraceError if it is no trace of torch.profiler."""
    try:
        told = data.get("distributedInfo") or {}
        zero_ns = int(data.get("baseTimeNanoseconds") or 0)
        events = list(_events(data["traceEvents"], zero_ns))
        world, rank = int(told.get("world_size") or 0), told.get("rank")
        rank = None if rank is None else int(rank)
        groups = _groups(told.get("pg_config"), tuple(range(world)))
        host = str(data.get("host_name") or "")
        of_python = (e.get("pid") for e in data["traceEvents"] if isinstance(e, dict) and e.get("cat") in OF_PYTHON)
        process = next(of_python, None)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is no trace of torch.profiler: {error}") from None
    return File(str(path), rank, world, host, process, groups, sorted(events, key=lambda e: e.start_ns))


def read_json(path: str | PathLike[str]) -> dict:
    """The content of a file. Raises TraceError, also if it ends early."""
    try:
        raw = Path(path).read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        data = json.loads(raw.decode("utf-8", "replace"), strict=False)  # names may hold control characters
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is cut off or damaged: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is no trace of torch.profiler: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise TraceError(f"{path} is no trace of torch.profiler: it has no list named traceEvents")
    return data


def _events(entries: Iterable[dict], zero_ns: int) -> Iterator[Event]:
    """The entries that last, with their times in ns."""
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("ph") != "X" or "ts" not in entry:
            continue
        start_us, dur_us = float(entry["ts"]), float(entry.get("dur") or 0.0)  # some write them as text
        if not (math.isfinite(start_us) and math.isfinite(dur_us)):
            raise ValueError(f"{entry.get('name')} begins at {entry['ts']} and lasts {entry.get('dur')}")
        part_us, whole_us = math.modf(start_us)  # since 1970 they are so large that a product would lose digits
        start_ns, args = zero_ns + int(whole_us) * 1000 + round(part_us * 1e3), entry.get("args")
        yield Event(
            str(entry.get("name") or ""),
            str(entry.get("cat") or "").lower(),
            entry.get("tid"),
            start_ns,
            start_ns + max(0, round(dur_us * 1e3)),
            args if isinstance(args, dict) else {},
        )


def _groups(told: object, world: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Process groups by name, from `pg_config`; before torch 2.4 they have no description."""
    groups = {}
    for group in told if isinstance(told, list) else ():
        name, ranks = str(group.get("pg_name", "")), group.get("ranks") or world
        if isinstance(ranks, str):
            ranks = re.findall(r"\d+", ranks)
        described = str(group.get("pg_desc") or "")
        axis = "world" if described == "default_pg" or len(ranks) == len(world) and not described else described
        groups[name] = axis or f"group {name}", tuple(map(int, ranks))
    return groups


def with_ranks(files: list[File]) -> list[File]:
    """Give each file its rank: what it says itself, else what its name says.

    Raises:
        TraceError: a file says neither, or two of the same rank were recorded at the same time. Files of a rank that
            follow each other are cycles of one profiler (`schedule(repeat=2)`).
    """
    unknown = [file for file in files if file.rank is None]
    for file, rank in zip(unknown, ranks_of_names([Path(file.path) for file in unknown]), strict=True):
        file.rank = rank
    worlds = sorted({file.world for file in files if file.world})
    if len(worlds) > 1:
        raise TraceError(f"the files are of runs of different sizes: {' and '.join(map(str, worlds))} ranks")
    by_rank: dict[int, list[File]] = {}
    for file in files:
        by_rank.setdefault(file.rank, []).append(file)
    for rank, its in by_rank.items():
        windows = sorted(file.window for file in its if file.events)
        overlap = any(b[0] < a[1] for a, b in zip(windows, windows[1:], strict=False))
        if len(windows) < len(its) > 1 or overlap or len({file.process for file in its}) > 1:
            names = ", ".join(Path(file.path).name for file in its)
            of = ", ".join(str(file.rank) for file in files)
            raise TraceError(f"two files are of one rank: they are of ranks {of}; of rank {rank} are {names}")
    return files


def ranks_of_names(paths: Sequence[Path]) -> list[int]:
    """The rank that each name says: rank3.json, rank_3/trace.json, or trace_3.json of trace_0.json, trace_1.json ...

    Raises TraceError if one says none; a single file is of rank 0.
    """
    ranks = []
    for path in paths:
        said = NAMED.findall(path.name) or NAMED.findall(path.parent.name)
        ranks.append(int(said[-1]) if said else None)
    numbers = [re.findall(r"\d+", path.name) for path in paths]
    alike = len({re.sub(r"\d+", "#", path.name) for path in paths}) == 1
    counted = sorted(int(found[0]) for found in numbers if len(found) == 1) == [*range(len(paths))]
    if None in ranks and alike and counted:
        return [int(found[0]) for found in numbers]
    if None in ranks and len(paths) > 1:
        raise TraceError(
            f"{paths[ranks.index(None)]} does not say of which rank it is: name the files rank0.json, rank1.json, and "
            "so on"
        )
    return [rank or 0 for rank in ranks]
