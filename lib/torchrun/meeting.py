"""Ranks that torchrun started meet before they connect, on one machine or on several.

The problem: torchrun starts the ranks of each machine, and nobody compares what was started. A different seed on one
machine trains garbage, a different number of steps hangs. A restarted rank finds the addresses of ended ranks in the
store that torchrun keeps (pytorch/pytorch#135712). And on Debian a machine's own name means 127.0.1.1, an address that
no other machine can reach.
The idea: before there is a process group, every rank writes into the store who it is: its machine, its address, its
settings. A round of entries has the name of a random number, so entries of ended ranks do not count:

    rank 0                               rank r
    round: 7f3a…                 →       reads the name of the round
    waits for all entries        ←       writes its entry there
    writes the roster            →       reads it, and finds itself

Then all ranks hold the same roster, and find the same difference in it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lib.runtime.errors import StartError
from lib.runtime.hang import named_ranks

START_S = 120.0  # for a rank to arrive, and to connect
LIB = Path(__file__).parents[1]


@dataclass(frozen=True)
class Member:
    """What a rank says of itself."""

    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=lambda: _machine())  # tells its machine, or container, from all others
    address: str = ""  # in the network in which it found the store; "" on the machine of the store itself
    settings: Mapping[str, object] = field(default_factory=dict)  # what must be equal on all ranks
    files: Mapping[str, int] = field(default_factory=dict)  # the checksums of the library's files
    problem: str = ""  # why it cannot start
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)


def meet(rank: int, size: int, settings: Mapping[str, object], problem: str = "") -> tuple[dist.Store, list[Member]]:
    """Return the store of this round, and the roster in rank order; all ranks call it.

    Raises:
        StartError: a rank did not come, has a problem, or has other settings, or another library, than rank 0; on
            every rank.
    """
    settings = {**settings, "torch": torch.__version__.partition("+")[0]}
    store, members = roster(rank, size, settings, problem, START_S)
    if missing := [i for i, member in enumerate(members) if member is None]:
        raise StartError(
            f"{named_ranks(missing)} of {size} did not come to {_where()} within {START_S:.0f} s: see what torchrun "
            "says on the other machines",
            tuple(missing),
        )
    _check_alike(members)
    return store, members


def roster(
    rank: int, size: int, settings: Mapping[str, object], problem: str, start_s: float
) -> tuple[dist.Store, list[Member | None]]:
    """Return the store of this round, and who came within `start_s`, in rank order; None for a rank that did not.

    Raises:
        StartError: this rank found no store, or no rank 0.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank per machine reads the library's files
    sources = {path.relative_to(LIB).as_posix(): path for path in LIB.rglob("*.py")} if first else {}
    files = {name: zlib.crc32(path.read_bytes()) for name, path in sources.items()}
    mine = Member(address=address_towards(os.environ["MASTER_ADDR"]), settings=settings, files=files, problem=problem)
    store = None
    try:
        store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=start_s)))
        store = dist.PrefixStore("parallel by hand", store)
        entries = _collect(store, size, mine, start_s) if rank == 0 else _enter(store, rank, mine, start_s)
    except (dist.DistError, TimeoutError) as error:
        why = "rank 0 does not answer" if store else (str(error) or type(error).__name__).splitlines()[0]
        raise StartError(
            f"rank {rank} of {size} on {mine.host} found no ranks at {_where()} for {start_s:.0f} s: torchrun must run "
            f"on every machine, with the same --rdzv-endpoint, and reach it ({why})",
            (0,) if store else (),
        ) from None
    members = [entry and Member(**entry) for entry in entries]
    return dist.PrefixStore(members[0].nonce, store), members


def _where() -> str:
    """The address of torchrun's store."""
    return "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)


def _collect(store: dist.Store, size: int, mine: Member, start_s: float) -> list[dict | None]:
    """On rank 0: begin a round, and return all entries; None for a rank that did not come."""
    store.set("round", mine.nonce)
    keys = [f"{mine.nonce} {rank}" for rank in range(size)]
    store.set(keys[0], json.dumps(asdict(mine)))
    with suppress(dist.DistError):  # some did not come
        store.wait(keys, timedelta(seconds=start_s))
    entries = [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
    store.set(f"{mine.nonce} roster", json.dumps(entries))
    return entries


def _enter(store: dist.Store, rank: int, mine: Member, start_s: float) -> list[dict | None]:
    """On all further ranks: enter the round, again if rank 0 has been restarted since, and return its roster."""
    entered, until = "", time.monotonic() + start_s + 5  # rank 0 waits as long, and says who is missing
    while time.monotonic() < until:
        current = store.get("round").decode()
        if current != entered:
            store.set(f"{current} {rank}", json.dumps(asdict(mine)))
            entered = current
        if store.check([f"{entered} roster"]):
            entries = json.loads(store.get(f"{entered} roster"))
            if entries[rank] and entries[rank]["nonce"] == mine.nonce:  # otherwise it is the roster of an ended round
                return entries
        time.sleep(0.02)
    raise TimeoutError("rank 0 does not answer")


def _check_alike(members: list[Member]) -> None:
    """Raise StartError for the first problem, or the first difference from rank 0."""
    first, several = members[0], len({member.machine for member in members}) > 1
    for member in members:
        if member.problem:
            raise StartError(f"{member.host}: {member.problem}" if several else member.problem)
        if member.files and (names := _differences(member.files, first.files)):
            raise StartError(
                f"lib/{names[0]} on {member.host} differs from that on {first.host}: copy one library to all machines"
            )
        if keys := _differences(member.settings, first.settings):
            here, there = (", ".join(f"{k}={x.settings.get(k)}" for k in keys[:3]) for x in (member, first))
            raise StartError(
                f"{member.host} was started with {here}, and {first.host} with {there}: give all machines the same"
            )


def _differences(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


# ---- the network ----------------------------------------------------------------------------------------------------


def choose_interface(rank: int, members: list[Member]) -> str:
    """Let gloo use the network in which the machines found each other, if it has an interface here; say which it uses.

    GLOO_SOCKET_IFNAME, if set, stays.
    """
    mine = members[rank]
    others = [member for member in members if member.machine != mine.machine]
    reached = next((other.address for other in others if other.address), "")
    address = mine.address or (address_towards(reached) if others else "127.0.0.1")
    name = next((name for name, own in interfaces().items() if own == address), "")
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return os.environ.get("GLOO_SOCKET_IFNAME", "the network of this machine's name")


def interfaces() -> dict[str, str]:
    """Network interface → its IPv4 address, of those that have one; empty where the system is not Linux."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(ImportError):
        from fcntl import ioctl

        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = ioctl(any_socket.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def address_towards(host: str) -> str:
    """The IPv4 address from which this machine would send to a host; "" if it is this machine, or unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nothing_is_sent, suppress(OSError):
        nothing_is_sent.connect((host, 9))
        mine, theirs = nothing_is_sent.getsockname()[0], nothing_is_sent.getpeername()[0]
        if mine != theirs and not mine.startswith("127."):
            return mine
    return ""


def _machine() -> str:
    """The network of this process: of two containers on one machine each has its own."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(parts)
