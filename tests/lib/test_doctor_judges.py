"""What the doctor says of made-up measurements: speeds that are not plausible, ranks that stand still, busy hosts."""

import dataclasses
import json

import pytest

from lib.doctor import counters, settings, transport
from lib.doctor.__main__ import main
from lib.doctor.expected import Expected
from lib.doctor.judgement import Judgement
from lib.doctor.measurement import Measurement
from lib.doctor.page import Examination, tell
from lib.doctor.plausible import judge_collectives, judge_links
from lib.doctor.products import Place, Ran, is_crowded, turns_of
from lib.doctor.ranks import judge_ranks
from lib.doctor.settings import Finding
from lib.doctor.transport import Transport
from lib.torchrun.meeting import Member

MiB = 2**20
GOOD = Ran(wall_s=2.0, cpu_s=1.99, waited_s=0.01, throttled_s=0.0, flops=1e11, load=1.0, cores=2)


def members(hosts):
    """A rank for each letter, on the host of that letter."""
    said = {"threads": "1", "cores": "8", "device": "cpu", "torch": "2.9"}
    return [Member(f"node-{one}", one, settings=said) for one in hosts]


def measured(hosts, between_Bps, within_Bps=1e9, reduce_s=1e-9, ran=GOOD):  # noqa: N803 a unit
    """Rounds on these hosts, all links of a kind alike."""
    seconds = {}
    for a, b in ((a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b):
        seconds["transfer", a, b] = [MiB / (within_Bps if hosts[a] == hosts[b] else between_Bps)] * 4
        if a < b:
            seconds["latency", a, b] = [1e-4] * 4
    seconds["all_reduce", "dp", tuple(range(len(hosts)))] = [reduce_s] * 4
    return Measurement(seconds, {}, MiB, dict.fromkeys(range(len(hosts)), ran))


def links_of(hosts, between_Bps, *options, driver_Bps=None, **more):  # noqa: N803 a unit
    over = dict.fromkeys(range(len(hosts)), Transport("TCP", "eth0 (10.0.0.1)", driver_Bps))
    given = Expected.of(*options or (None, None))
    return judge_links(measured(hosts, between_Bps, **more), members(hosts), over, given)


# ---- speeds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "Bps"),
    [
        ("400Gb", 50e9),
        ("900GB/s", 900e9),
        ("40Mbit", 5e6),
        ("100 Gbit/s", 12.5e9),
        ("10Gbps", 1.25e9),
        ("5MB/s", 5e6),
    ],
)
def test_what_a_link_should_give(text, Bps):  # noqa: N803 a unit
    assert Expected.of(text, None).between_Bps == Bps


@pytest.mark.parametrize(
    "words", [["--expect", "400"], ["--expect", "fast"], ["--gpu", "h9000"], ["--expect", "0Gb"]]
)
def test_figures_that_cannot_be_understood(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and words[1] in capsys.readouterr().err


def test_links_below_half_of_what_the_reader_expects():
    (found,) = links_of("aabb", 5e6, "1Gb", None).findings
    assert found.kind == "network" and found.ranks == (0, 1, 2, 3)
    assert "8 of 8 links between hosts" in found.text and "5 MB/s, 4 % of the 125 MB/s of --expect 1Gb" in found.text
    assert links_of("aabb", 1e8, "1Gb", None) == Judgement(), "TCP does not reach all of it"
    assert links_of("ab", 5e6, "40Mbit", None) == Judgement()


def test_a_gpu_has_links_within_a_host_and_between():
    both = links_of("aabb", 5e6, None, "h100").findings
    assert ["within a host" in one.text for one in both] == [True, False]
    assert links_of("aabb", 45e9, None, "h100", within_Bps=4e11) == Judgement()
    (found,) = links_of("aabb", 12e9, "400Gb", "h100", within_Bps=4e11).findings
    assert "24 % of the 50 GB/s of --expect 400Gb" in found.text


def test_between_hosts_far_slower_than_within():
    (found,) = links_of("aabb", 5e6).findings
    assert found.kind == "network" and "5 MB/s; within a host they give 1 GB/s, 200 times as much" in found.text
    assert not links_of("aabb", 1.1e8).findings, "a gigabit between hosts is usual"


def test_what_the_driver_of_an_interface_says():
    (found,) = links_of("ab", 5e6, driver_Bps=1.25e9).findings
    assert "0.4 % of the 1.25 GB/s that the driver of eth0 (10.0.0.1) names" in found.text
    assert links_of("ab", 9e7, driver_Bps=1.25e9) == Judgement()
    assert links_of("ab", 2e8, driver_Bps=50e9) == Judgement(), "one TCP connection does not reach a twentieth of it"


def test_one_link_without_a_figure_is_not_judged():
    (said,) = links_of("ab", 5e6).not_judged
    assert said.startswith("how fast the links between hosts should be") and "--expect" in said
    (said,) = links_of("aa", 5e6).not_judged
    assert said == "the link of ranks 0 and 1: there is no other like it"
    alone = links_of("aaa", 5e6, "400Gb", None)
    assert alone.not_judged == ["--expect 400Gb: all ranks are on one host, with no link between hosts"]


def test_a_collective_far_above_its_formula():
    def judged(times, **more):
        like = measured("aaaa", 1e9)
        return judge_collectives(measured("aaaa", 1e9, reduce_s=times * like.model_s((0, 1, 2, 3)), **more))

    (found,) = judged(5).findings
    assert found.kind == "collective" and found.ranks == (0, 1, 2, 3) and "5.0 times the" in found.text
    assert judged(2) == Judgement()
    for ran, why in ((dataclasses.replace(GOOD, crowded=True), "fewer cores"), (busy(), "busy machine")):
        judgement = judged(5, ran=ran)
        assert not judgement.findings and why in judgement.not_judged[0]


# ---- ranks ----------------------------------------------------------------------------------------------------------


def busy(**more):
    """A rank that two endless loops kept from its processor for half of the time."""
    return dataclasses.replace(GOOD, **{"cpu_s": 1.0, "waited_s": 1.0, "flops": 5e10, "load": 4.0} | more)


def ranks_of(*ran, gpu=None):
    return judge_ranks(dict(enumerate(ran)), members("a" * len(ran)), Expected.of(None, gpu))


def test_a_rank_that_stands_still_is_slow_on_a_quiet_machine_and_on_a_busy_one():
    stopped = dataclasses.replace(GOOD, cpu_s=1.2, waited_s=0.0, flops=6e10)
    quota = dataclasses.replace(stopped, throttled_s=0.8)
    for ill, why in ((stopped, "though no other program had its processor"), (quota, "held back by a CPU quota")):
        (found,) = ranks_of(GOOD, ill).findings
        assert found.kind == "slow" and found.ranks == (1,) and "stood still for 40 %" in found.text, found
        assert why in found.text
    assert ranks_of(GOOD, GOOD) == Judgement() and ranks_of(stopped).findings, "it needs no other to compare with"
    among = ranks_of(busy(), dataclasses.replace(busy(), cpu_s=0.4))
    assert [one.ranks for one in among.findings] == [(1,)] and "ranks 0" not in among.not_judged[0]


def test_a_busy_machine_is_not_judged():
    judgement = ranks_of(GOOD, busy())
    (said,) = judgement.not_judged
    assert not judgement.findings
    assert said.startswith("rank speeds: busy machine node-a, load 4.0 on 2 cores: other programs kept rank 1")
    assert said.endswith("from a processor, rank 1 for 50 % of 2.0 s")


def test_a_slow_processor_beside_the_others():
    slow = dataclasses.replace(GOOD, flops=6e10)
    assert (
        [one.ranks for one in ranks_of(GOOD, slow, GOOD).findings]
        == [(1,)]
        == [one.ranks for one in ranks_of(GOOD, slow).findings]
    )
    assert not ranks_of(GOOD, dataclasses.replace(GOOD, flops=8e10)).findings


def test_a_system_that_does_not_count_waiting_says_so():
    blind = dataclasses.replace(GOOD, waited_s=None, cpu_s=1.2)
    judgement = ranks_of(blind, blind)
    assert not judgement.findings and "whether something stops ranks 0 and 1" in judgement.not_judged[0]
    assert "busy" in ranks_of(dataclasses.replace(blind, load=9.0)).not_judged[0]


def test_gpus_beside_the_table():
    gpu = Ran(2.0, 0.0, None, 0.0, flops=7e14, on_gpu=True)
    assert ranks_of(gpu, gpu, gpu=None) == Judgement() == ranks_of(gpu, gpu, gpu="h100")
    weak = dataclasses.replace(gpu, flops=3e14)
    both = ranks_of(weak, weak, gpu="h100").findings
    assert [one.ranks for one in both] == [(0,), (1,)] and "300 TFLOP/s in 16 bit, and --gpu h100 can" in both[0].text
    assert [one.ranks for one in ranks_of(gpu, weak, gpu).findings] == [(1,)], "it clocks down"
    (found,) = ranks_of(GOOD, GOOD, gpu="h100").findings
    assert found.ranks == (0, 1) and "compute on the CPU" in found.text


def test_ranks_take_turns_and_leave_half_of_the_cores():
    def turns(*places):
        return turns_of([Place(kernel, tuple(cores), threads) for kernel, cores, threads in places])

    assert turns(("x", [0, 1], 1), ("x", [0, 1], 1)) == [0, 1], "also in two containers"
    assert turns(("x", [0, 1], 1), ("y", [0, 1], 1)) == [0, 0], "on two machines"
    assert turns(("x", [0], 1), ("x", [1], 1), ("x", [2, 3], 1)) == [0, 0, 1]
    assert turns(*[("x", range(8), 1)] * 8) == [0] * 4 + [1] * 4 and turns(*[("x", range(8), 4)] * 3) == [0, 1, 2]
    eight = [Place("x", tuple(range(8)), 2)] * 4
    assert not is_crowded(eight, 0) and is_crowded([*eight, eight[0]], 0)


def test_a_quota_is_read_from_either_version_of_cgroups(tmp_path, monkeypatch):
    folder = tmp_path / "pod" / "one"
    folder.mkdir(parents=True)
    (folder / "cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n")
    assert counters._quota_of(folder) == (1.5, 2, 0) and counters._quota_of(tmp_path) == (0.0, 0, 0)
    (folder / "cpu.stat").write_text("nr_periods 5\nnr_throttled 2\nthrottled_time 700000000\n")
    assert counters._quota_of(folder) == (0.7, 2, 5)


# ---- the way of the messages ----------------------------------------------------------------------------------------

SOCKET = """
node0:41:52 [0] NCCL INFO NET/IB : No device found.
node0:41:52 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.12.210<0>
node0:41:52 [0] NCCL INFO Using network Socket
node0:41:52 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
INFINIBAND = """
node0:41:52 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:192.168.11.1<0>
node0:41:52 [0] NCCL INFO Using network IB
node0:41:52 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""


def test_what_nccl_chose():
    one = transport.parsed(SOCKET, ())
    assert (one.name, one.over) == ("TCP", "[0]ens3:172.31.12.210<0>")
    other = transport.parsed(INFINIBAND, ("mlx5_0",))
    assert (other.name, other.over) == ("InfiniBand or RoCE", "[0]mlx5_0:1/IB")
    assert "NCCL_DEBUG=INFO" in transport.parsed("nothing", ()).unseen
    assert "NCCL_DEBUG=INFO" in transport.transport_text(transport.transport_of_nccl(None))


def test_tcp_on_hosts_with_infiniband_is_found():
    slow = dict.fromkeys(range(2), transport.parsed(SOCKET, ("mlx5_0", "mlx5_1")))
    (found,) = judge_links(measured("ab", 1e9), members("ab"), slow, Expected()).findings
    assert found.kind == "network" and found.ranks == (0, 1) and "mlx5_0, mlx5_1" in found.text
    unseen = dict.fromkeys(range(2), transport.transport_of_nccl(None))
    judgement = judge_links(measured("ab", 1e9), members("ab"), unseen, Expected())
    assert not judgement.findings and "NCCL chose on ranks 0 and 1" in judgement.not_judged[-1]


@pytest.mark.parametrize(
    ("value", "found"),
    [("LL128", True), ("simple, ll128", True), ("^LL128", False), ("Simple", False), ("LL", False)],
)
def test_a_forced_ll128(value, found):
    said = settings.judge_settings({rank: Member("a", "a", settings={"NCCL_PROTO": value}) for rank in range(3)})
    assert bool(said) is found
    assert not found or said[0].ranks == (0, 1, 2) and f"NCCL_PROTO={value} on ranks 0, 1 and 2" in said[0].text


# ---- what is said of it ---------------------------------------------------------------------------------------------


def report_of(hosts, *options, **more):
    return Examination(
        members(hosts), "gloo", measured(hosts, 1e9), expected=Expected.of(*options or (None, None)), **more
    )


def told(report, capsys, tmp_path):
    """The exit code and the last line of a report; the file has the same, and the same page."""
    tell(report, tmp_path / "found.json")
    page, data = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert data["exit_code"] == report.exit_code and data["page"] + "\n" == page
    return report.exit_code, page.splitlines()[-1]


def test_exit_codes(capsys, tmp_path):
    def ends(report):
        return told(report, capsys, tmp_path)

    assert ends(report_of("aabb")) == (0, "nothing looks wrong")
    assert ends(report_of("aabb", not_judged=["x"])) == (0, "nothing looks wrong in what was judged")
    assert ends(report_of("aabb", findings=[Finding("slow", (1,), "rank 1 is slow")])) == (1, "  1. rank 1 is slow")
    assert ends(report_of("aaaa", "400Gb", None))[0] == 2, "no link is between hosts"
    assert ends(report_of("a"))[0] == 2, "one rank has no links"
    assert ends(report_of("aabb", "400Gb", None))[0] == 0


def test_the_verdict_says_what_it_looked_at_and_what_not():
    text = report_of("aabb", not_judged=["rank speeds: busy machine"]).page()
    assert "looked at: the settings of 4 ranks; 12 links" in text and "not judged: rank speeds: busy machine" in text
    assert "links compared only with each other: nobody said how fast they should be; use --expect" in text
    text = report_of("aabb", "400Gb", None).page()
    assert "links compared with each other, between hosts with 50 GB/s (--expect 400Gb)" in text
    assert "--expect is of those between hosts" in report_of("aaaa", "400Gb", None).page()
    ended = Examination(members("ab"), "gloo", findings=[Finding("hang", (1,), "they wait for rank 1")])
    assert "not judged: links, processors and collectives: the examination ended before" in ended.page()
    assert ended.exit_code == 1 and ended.data()["not_judged"]


def test_a_finding_counts_if_a_second_measurement_has_it():
    first = Judgement([Finding("slow", (1,), "a"), Finding("link", (0, 1), "b")], ["c"])
    again = Judgement([Finding("slow", (1,), "d"), Finding("slow", (2,), "e")], ["f"])
    assert first.confirmed_by(again) == Judgement([Finding("slow", (1,), "d")], ["f"])


def test_a_rank_that_is_slow_in_two_ways_is_one_finding():
    judgement = Judgement([Finding("slow", (1,), "it stood still")])
    judgement.add(Judgement([Finding("slow", (1,), "its matmuls take long"), Finding("slow", (2,), "so do these")]))
    assert [one.text for one in judgement.findings] == ["it stood still", "so do these"]
