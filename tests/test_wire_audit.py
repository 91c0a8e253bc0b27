"""The kernel's count of what crossed the wire, beside our own."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from lib import cost, wire_audit

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.alone("the kernel counts what all programs send through the loopback interface"),
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(not wire_audit.available(), reason="only Linux counts what its loopback interface carries"),
    pytest.mark.flaky(reruns=2),  # another program may use the interface meanwhile
]
MESSAGE_BYTES = 256 * 2**10


@pytest.mark.thorough("each collective on each number of ranks", keep=8)
@pytest.mark.parametrize("kind", wire_audit.CALLS)
@pytest.mark.parametrize("n", [3, 2, 4, 8])
def test_what_is_counted_is_what_is_sent(kind, n):
    audit = wire_audit.audit(kind, n * MESSAGE_BYTES, n)
    assert audit.counted_bytes == cost.wire_bytes(kind, n * MESSAGE_BYTES, n)
    assert audit.sent_bytes == pytest.approx(audit.counted_bytes, rel=0.01)  # TCP's headers are about 0.1%


@pytest.mark.parametrize("n", [2, 4])
def test_the_kernel_sees_what_no_counter_sees(n):
    """gloo's own reduce-scatter is an all-reduce inside: it sends twice what is counted. If it learns, ours can go."""
    own = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def call(x, group):
        own(torch.empty(len(x) // group.size), x)

    audit = wire_audit.audit("reduce_scatter", n * 2**20, n, call)
    assert audit.counted_bytes == cost.wire_bytes("reduce_scatter", n * 2**20, n)
    assert 1.98 <= audit.sent_bytes / audit.counted_bytes <= 2.1


def test_what_cannot_be_audited(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="payload_bytes=100 must be a multiple of 16: float32, split over 4 ranks"):
        wire_audit.audit("all_reduce", 100, 4)
    with pytest.raises(ValueError, match="unknown collective 'allreduce'; known are all_reduce, "):
        wire_audit.audit("allreduce", 160, 4)
    monkeypatch.setattr(wire_audit, "COUNTER", tmp_path / "none")
    with pytest.raises(OSError, match="which only Linux has"):
        wire_audit.audit("all_reduce", 160, 4)
