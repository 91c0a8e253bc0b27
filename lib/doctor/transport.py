"""Which way the messages of this rank take: gloo's network interface, or what NCCL chose.

The problem: NCCL without InfiniBand sends over TCP, without a word, and a run on two hosts is ten times too slow. It
says what it chose only in its own log.
The idea: gloo uses one interface, whose address and speed the system knows. NCCL is asked to write its log into a
file, unless the reader has asked for one, and three of its lines are read.
"""

import os
import re
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lib.torchrun.meeting import interfaces

NET, CARDS = Path("/sys/class/net"), Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Transport:
    """What carries the messages of a rank to other hosts.

    Args:
        name: such as `TCP`, `InfiniBand or RoCE`, or the name of a plugin; "" if it cannot be seen.
        over: the interface or card.
        Bps: bytes per second that the interface says of itself; None if it does not.
        cards: of InfiniBand or RoCE in this host, which NCCL could use.
        unseen: why it cannot be seen.
    """

    name: str
    over: str = ""
    Bps: float | None = None  # noqa: N815 a unit
    cards: tuple[str, ...] = ()
    unseen: str = ""


def transport_of_gloo() -> Transport:
    """The interface that gloo uses, chosen by `GLOO_SOCKET_IFNAME`, or by the address of this host's name."""
    here, name = interfaces(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not name:
        with suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
            name = next((name for name, own in here.items() if own == address), address)
    over = f"{name} ({here[name]})" if name in here else name
    return Transport("TCP", over, _interface_speed(name))


def ask_nccl() -> Path | None:
    """Let NCCL, which has not started yet, write what it chooses into this file; a log that the reader wants stays."""
    if os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        return None
    try:
        file, path = tempfile.mkstemp(prefix="nccl-", suffix=".log")
    except OSError:  # a full disk
        return None
    os.close(file)
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM", "NCCL_DEBUG_FILE": path}
    return Path(path)


def transport_of_nccl(log: Path | None) -> Transport:
    """What NCCL wrote into the file of `ask_nccl` with its first messages; the file is removed."""
    if log is None:
        return Transport("", cards=_cards(), unseen="read the lines NET/ that NCCL_DEBUG=INFO writes")
    try:
        said = log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
    except OSError as error:
        return Transport("", cards=_cards(), unseen=f"NCCL's log cannot be read: {error.strerror}")
    return parsed(said, _cards())


def parsed(said: str, cards: tuple[str, ...]) -> Transport:
    """The transport that a log of NCCL names: by the channels that it opened, else by the network that it chose."""
    via = re.search(r"via NET/([^/\n]+)/", said)
    using = re.search(r"Using network (.+)", said)
    if not via and not using:
        return Transport("", cards=cards, unseen="NCCL's log names no network: start with NCCL_DEBUG=INFO to see it")
    name = via[1] if via else using[1].strip()
    over = re.search(rf"NET/{re.escape(name)} ?: Using (\S+)", said)
    names = {"Socket": "TCP", "IB": "InfiniBand or RoCE"}
    first = re.search(r"\[0\](\w+)", over[1]) if over else None
    speed = _interface_speed(first[1]) if name == "Socket" and first else None
    return Transport(names.get(name, name), over[1] if over else "", speed, cards)


def transport_text(transport: Transport) -> str:
    """The transport in words."""
    if transport.unseen:
        return f"a way that cannot be seen ({transport.unseen})"
    text = f"{transport.name} over {transport.over}" if transport.over else transport.name
    if transport.name == "TCP":
        speed = f"{transport.Bps * 8 / 1e9:g} Gb/s by its driver" if transport.Bps else "its driver names no speed"
        cards = f"the host has InfiniBand or RoCE: {', '.join(transport.cards)}" if transport.cards else ""
        text += f" ({'; '.join(filter(None, (speed, cards)))})"
    return text


def _interface_speed(name: str) -> float | None:
    with suppress(OSError, ValueError):
        megabits = int((NET / name / "speed").read_text())
        return megabits * 1e6 / 8 if megabits > 0 else None
    return None


def _cards() -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted(path.name for path in CARDS.iterdir()))
    return ()


def grouped(transports: Mapping[int, Transport]) -> dict[Transport, list[int]]:
    """Transport → its ranks."""
    ranks: dict[Transport, list[int]] = {}
    for rank, transport in transports.items():
        ranks.setdefault(transport, []).append(rank)
    return ranks
