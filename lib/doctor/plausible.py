"""Whether the links are as fast as they should be, and the collectives as fast as their links.

The problem: links that are compared with their likes look well if all are slow, and two hosts with one cable have no
likes at all. The idea: a link is compared with whatever names a speed for it, the first of these that there is:

    the reader                    --expect 400Gb, --gpu h100: less than half is a finding
    the driver of the interface   less than a twentieth, or of what one TCP connection can give, if that is less
    the links within a host       between hosts less than a twentieth

Otherwise the verdict says that nobody did. A collective is compared with its formula on the measured links.
"""

from collections.abc import Mapping, Sequence

from lib.doctor.expected import Expected, speed_text
from lib.doctor.judgement import Judgement
from lib.doctor.measurement import Measurement
from lib.doctor.settings import Finding
from lib.doctor.transport import Transport
from lib.runtime.hang import named_ranks
from lib.torchrun.meeting import Member

LEAST_OF_EXPECTED = 0.5
TIMES_OF_LIKES = 20.0  # NVLink and a card of 400 Gb/s differ by 9 to 18
TIMES_OF_FORMULA = 4.0
ONE_CONNECTION_BPS = 2.5e9  # of TCP, on a fast network
Speeds = Mapping[tuple[int, int], float]


def judge_links(
    measured: Measurement, members: Sequence[Member], transports: Mapping[int, Transport], expected: Expected
) -> Judgement:
    """Links whose speed is not plausible, and what the speeds were compared with."""
    judgement = Judgement()
    within, between = (measured.speeds(members, within=is_within) for is_within in (True, False))
    if expected.within_Bps and within:
        _compare_expected(judgement, "within a host", within, expected.within_Bps, expected.gpu_said)
    if expected.between_Bps and between:
        _compare_expected(judgement, "between hosts", between, expected.between_Bps, expected.between_said)
    elif between:
        compared = [_compare_driver(judgement, between, transports), _compare_within(judgement, between, within)]
        if not any(compared):
            judgement.not_judged.append(
                "how fast the links between hosts should be: nobody said it, no driver does, and there is no link "
                "within a host; use --expect 400Gb or --gpu h100"
            )
    elif expected.between_said != expected.gpu_said:
        judgement.not_judged.append(f"{expected.between_said}: all ranks are on one host, with no link between hosts")
    if 0 < len(within) < 3 and not expected.within_Bps:
        judgement.not_judged.append(f"the link of {named_ranks(_ranks_of(within))}: there is no other like it")
    _judge_transports(judgement, transports, several_hosts=bool(between))
    return judgement


def compared_with(expected: Expected, members: Sequence[Member]) -> str:
    """What the speeds of links were compared with, in words."""
    hosts = len({member.machine for member in members})
    said = []
    if expected.between_Bps and hosts > 1:
        said.append(f"between hosts with {speed_text(expected.between_Bps)} ({expected.between_said})")
    if expected.within_Bps and hosts < len(members):
        said.append(f"within a host with {speed_text(expected.within_Bps)} ({expected.gpu_said})")
    if said:
        return f"links compared with each other, {' and '.join(said)}: less than half is a finding"
    if expected.between_Bps:
        return "links compared only with each other: --expect is of those between hosts; use --gpu h100 within one"
    return (
        "links compared only with each other: nobody said how fast they should be; use --expect 400Gb (a link between "
        "hosts) or --gpu h100"
    )


def judge_collectives(measured: Measurement) -> Judgement:
    """All-reduces that take much longer than a ring of their slowest link."""
    judgement = Judgement()
    shared = [rank for rank, ran in measured.ran.items() if ran.crowded or ran.is_busy]
    far: dict[str, list[tuple[float, str, tuple[int, ...]]]] = {}
    for (axis, ranks), s in measured.good("all_reduce").items():
        model_s = measured.model_s(ranks)
        if s > TIMES_OF_FORMULA * model_s and not {*ranks} & {*shared}:
            said = f"{s * 1e3:.3g} ms among {named_ranks(ranks)}, {s / model_s:.1f} times the {model_s * 1e3:.3g} ms"
            far.setdefault(axis, []).append((s / model_s, said, ranks))
    for axis, groups in far.items():
        _, said, ranks = max(groups)
        text = f"an all-reduce along {axis} takes {said} of a ring of its slowest link: no single link is the reason"
        judgement.findings.append(
            Finding("collective", ranks, f"{text}; groups that share a cable or a card are, or a late rank")
        )
    if shared and measured.of("all_reduce"):
        why = (
            "they have fewer cores than threads"
            if any(measured.ran[rank].crowded for rank in shared)
            else "busy machine"
        )
        judgement.not_judged.append(f"collectives of {named_ranks(shared)} beside their formula: {why}")
    return judgement


def _compare_expected(judgement: Judgement, where: str, speeds: Speeds, expected: float, said: str) -> None:
    """Add a finding for links below half of the expected speed."""
    slow = {pair: speed for pair, speed in speeds.items() if speed < LEAST_OF_EXPECTED * expected}
    if slow:
        text = f"{_slowest(where, slow, len(speeds))}, {_part(min(slow.values()), expected)} of the"
        judgement.findings.append(Finding("network", _ranks_of(slow), f"{text} {speed_text(expected)} of {said}"))


def _compare_driver(judgement: Judgement, speeds: Speeds, transports: Mapping[int, Transport]) -> bool:
    """Add a finding for links far below the speed that their driver says; return whether any driver says one."""
    said = {pair: min(transports[rank].Bps or 0.0 for rank in pair) for pair in speeds}
    least = {pair: min(driver_Bps, ONE_CONNECTION_BPS) / TIMES_OF_LIKES for pair, driver_Bps in said.items()}
    slow = {pair: speed for pair, speed in speeds.items() if speed < least[pair]}
    if slow:
        pair = min(slow, key=slow.get)
        text = f"{_slowest('between hosts', slow, len(speeds))}, {_part(slow[pair], said[pair])} of the"
        over = transports[pair[0]].over
        judgement.findings.append(
            Finding("network", _ranks_of(slow), f"{text} {speed_text(said[pair])} that the driver of {over} names")
        )
    return any(said.values())


def _compare_within(judgement: Judgement, between: Speeds, within: Speeds) -> bool:
    """Add a finding if links between hosts are far slower than those within; whether there are any within."""
    if within and (usual := _middle(within)) > TIMES_OF_LIKES * _middle(between):
        times = usual / _middle(between)
        text = f"{_slowest('between hosts', between, len(between))}; within a host they give {speed_text(usual)}"
        text += f", {times:.0f} times as much as usual between hosts: is this the network that they should use?"
        judgement.findings.append(Finding("network", _ranks_of(between), f"{text} (If so, say its speed: --expect)"))
    return bool(within)


def _judge_transports(judgement: Judgement, transports: Mapping[int, Transport], *, several_hosts: bool) -> None:
    """Add a finding for NCCL over TCP on hosts with InfiniBand, and say where its choice cannot be seen."""
    slow = [rank for rank, one in transports.items() if one.name == "TCP" and one.cards]
    if slow and several_hosts:
        one = transports[slow[0]]
        text = f"{named_ranks(slow)} send over TCP ({one.over}), and their hosts have InfiniBand or RoCE"
        text += f" ({', '.join(one.cards)})"
        judgement.findings.append(
            Finding("network", tuple(slow), f"{text}: is NCCL_IB_DISABLE set, or NCCL_NET, or a driver missing?")
        )
    if unseen := [rank for rank, one in transports.items() if one.unseen]:
        text = f"the network that NCCL chose on {named_ranks(unseen)}: {transports[unseen[0]].unseen}"
        judgement.not_judged.append(text)


def _slowest(where: str, slow: Speeds, among: int) -> str:
    (a, b), speed = min(slow.items(), key=lambda item: item[1])
    return f"{len(slow)} of {among} links {where} are too slow: from rank {a} to rank {b} it is {speed_text(speed)}"


def _part(speed: float, of: float) -> str:
    """What part of a speed one is: `40 %`, or `0.004 %`."""
    return f"{100 * speed / of:.2g} %"


def _middle(speeds: Speeds) -> float:
    return sorted(speeds.values())[len(speeds) // 2]


def _ranks_of(pairs: Mapping[tuple[int, int], float]) -> tuple[int, ...]:
    return tuple(sorted({rank for pair in pairs for rank in pair}))
