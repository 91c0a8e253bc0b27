"""The kernel's count of what each rank sends, beside our own: to the byte."""

import socket
import struct
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from book.trials import wire_audit
from book.trials.wire_audit import audit, sent_in_a_step
from lib import comm, cost
from lib.launch import RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(not wire_audit.available(), reason=wire_audit.ELSEWHERE),
]
MESSAGE_BYTES = 256 * 2**10
EXTRA_BYTES = 48  # the header of a message of gloo, and each of its two notices

MESSAGES = {  # of all n ranks together; gloo's ring goes around twice, with two segments for each rank
    "all_reduce": lambda n: 4 * n * (n - 1),
    "broadcast": lambda n: n - 1,
    "reduce": lambda n: (n - 1) * -(-n * MESSAGE_BYTES // 2**20),
}


def check(kind, n, **how):
    """All that is sent beyond what is counted: a header and two notices for each message, and nothing else."""
    size_bytes = n * MESSAGE_BYTES
    counted, sent = zip(*audit(kind, size_bytes, n, **how), strict=True)
    assert sum(counted) == pytest.approx(n * cost.wire_bytes(kind, size_bytes, n), rel=1e-12)
    messages = MESSAGES.get(kind, lambda n: n * (n - 1))(n)
    assert sum(sent) - sum(counted) == pytest.approx(3 * EXTRA_BYTES * messages)
    if kind not in ("broadcast", "reduce"):  # these two charge the root less, or more, than the others
        assert sent == (sent[0],) * n


@pytest.mark.thorough("each collective on each number of ranks", keep=1)
@pytest.mark.parametrize("kind", wire_audit.CALLS)
@pytest.mark.parametrize("n", [3, 2, 4, 8])
def test_what_is_counted_is_what_is_sent(kind, n):
    check(kind, n)


def one_percent_off(x, group, true=cost.wire_bytes):
    cost.wire_bytes = lambda *what: 1.01 * true(*what)
    comm.all_gather(x[: len(x) // group.size], group)


def one_number_more(x, group):
    comm.all_gather(x[: len(x) // group.size], group)
    dist.group.WORLD.allreduce([torch.ones(1)]).wait()  # past all that counts


def test_a_counter_that_is_off_is_found():
    for call in (one_percent_off, one_number_more):
        with pytest.raises(AssertionError):
            check("all_gather", 2, call=call)


def connected(host="127.0.0.1"):
    """Both ends of a TCP connection."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return socket.create_connection(server.getsockname()[:2]), server.accept()[0]


def has_ipv6():
    try:
        return bool([end.close() for end in connected("::1")])
    except OSError:
        return False


def of_many_kinds(world):
    old, kept = connected(), []

    def step():
        new, udp, unix = connected(), socket.socket(type=socket.SOCK_DGRAM), socket.socketpair()
        kept.extend([*new, new[0].dup(), udp, *unix])
        udp.bind(("127.0.0.1", 0))
        udp.sendto(bytes(9), udp.getsockname())
        for end, size in ((unix[0], 9), (old[0], 10), (new[1], 100), (new[0], 200_000)):
            end.sendall(bytes(size))  # no peer reads: of the last, a part waits to be sent
        if has_ipv6():
            kept.extend(connected("::1"))
            kept[-1].sendall(bytes(1000))

    return step


def test_all_bytes_of_a_ranks_tcp_connections_count_and_no_others():
    """Of old and new ones, once for each; a socket of another protocol has no part in it."""
    assert sent_in_a_step(of_many_kinds, 2) == [200_110 + 1000 * has_ipv6()] * 2


def test_a_step_that_does_not_wait_is_counted_whole():
    def make(world):
        under_way = []
        return lambda: under_way.append(comm.all_reduce_start(torch.ones(2**20), world))

    counted = cost.wire_bytes("all_reduce", 4 * 2**20, 2)
    assert sent_in_a_step(make, 2) == [counted + 3 * EXTRA_BYTES * MESSAGES["all_reduce"](2) / 2] * 2


def test_a_group_made_in_a_step_counts_and_one_that_a_step_ends_is_refused():
    def makes(world):
        groups = []

        def step():
            groups.append(dist.new_group([0, 1]))
            dist.all_reduce(torch.ones(MESSAGE_BYTES // 4), group=groups[-1])

        return step

    def ends(world):
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        return lambda: dist.destroy_process_group(groups.pop())

    sent = sum(sent_in_a_step(makes, 2))
    assert 2 * MESSAGE_BYTES < sent < 1.01 * 2 * MESSAGE_BYTES
    # The first rank that says so exits, perhaps while the other is still in the barrier; a socket may close late.
    says = r"the step closed \d TCP sockets?, whose count is lost: end its groups after it|closed its connections, as"
    with pytest.raises(RankError, match=says):
        sent_in_a_step(ends, 2)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", [2, 4])
def test_the_kernel_sees_what_no_counter_sees(n):
    """gloo's own reduce-scatter is an all-reduce inside: it sends twice what is counted. If it learns, ours can go."""
    own = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for counted, sent in audit(
        "reduce_scatter", n * 2**20, n, lambda x, group: own(torch.empty(len(x) // group.size), x)
    ):
        assert counted == cost.wire_bytes("reduce_scatter", n * 2**20, n)
        assert sent == pytest.approx(2 * counted, rel=0.001)


def test_what_cannot_be_audited(monkeypatch):
    with pytest.raises(ValueError, match="payload_bytes=100 must be a multiple of 16: float32, split over 4 ranks"):
        audit("all_reduce", 100, 4)
    with pytest.raises(ValueError, match="unknown collective 'allreduce'; known are all_reduce, "):
        audit("allreduce", 160, 4)
    resent = struct.pack("=144xI52xQQ", 7, 1500, 507)  # 7 bytes wait, 507 were sent twice
    for info, counts in (
        (b"", False),
        (bytes(104), False),
        (bytes(216), False),
        (resent, True),
    ):  # old kernels; gVisor
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "getsockopt", lambda *_, info=info: info)
            assert wire_audit.available() is counts
    monkeypatch.delattr(socket, "TCP_INFO")  # another system
    assert not wire_audit.available()
    with pytest.raises(OSError, match="only Linux, from 4.19 on, counts them"):
        audit("all_reduce", 160, 4)
    with pytest.raises(OSError, match="only Linux, from 4.19 on, counts them"):
        sent_in_a_step(of_many_kinds, 2)


def test_of_unequal_rows_each_rank_counts_what_it_sends():
    """To the byte, beside what gloo says in each of its n−1 messages, which may be empty."""
    table = [[0, 300, 20], [0, 7, 0], [500, 0, 40]]

    def call(x, group):
        return comm.all_to_all_rows(torch.ones(sum(table[group.rank]), 100), table, group)

    found = audit("all_to_all", 12, 3, call)
    assert [counted for counted, _ in found] == [400 * rows for rows in (320, 0, 500)]
    assert [sent - counted for counted, sent in found] == [2 * 3 * EXTRA_BYTES] * 3
