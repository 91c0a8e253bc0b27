"""Times made by the cost model give the link back; noise moves it little."""

import random

import pytest

from book.trials import fit
from lib import cost

SIZES = [4**k * 1024 for k in range(8)]


@pytest.mark.parametrize(("kind", "n"), [("send", 2), ("all_reduce", 4), ("broadcast", 3), ("all_gather", 8)])
def test_the_link_is_found_again(kind, n):
    seconds = [cost.comm_s(kind, size, n, 2e-5, 3e9) for size in SIZES]
    assert fit.fit_alpha_beta(SIZES, seconds, kind, n) == pytest.approx((2e-5, 3e9))


def test_small_messages_count_too():
    rng = random.Random(0)
    seconds = [cost.comm_s("send", size, 2, 2e-5, 3e9) * rng.uniform(0.8, 1.25) for size in SIZES]
    alpha_s, bandwidth_Bps = fit.fit_alpha_beta(SIZES, seconds)
    assert alpha_s == pytest.approx(2e-5, rel=0.25) and bandwidth_Bps == pytest.approx(3e9, rel=0.25)
    seconds[-1] *= 1.5  # one large message that was disturbed: 4 ms, two hundred times alpha
    assert fit.fit_alpha_beta(SIZES, seconds)[0] == pytest.approx(2e-5, rel=0.25)


def test_it_is_the_least_relative_error():
    seconds = [1e-4, 1.3e-4, 9e-4]
    sizes = [0, 1000, 10_000]

    def error(alpha_s, bandwidth_Bps):
        return sum(
            (cost.comm_s("send", s, 2, alpha_s, bandwidth_Bps) / t - 1) ** 2
            for s, t in zip(sizes, seconds, strict=True)
        )

    best = fit.fit_alpha_beta(sizes, seconds)
    for a in (0.99, 1, 1.01):
        for b in (0.99, 1, 1.01):
            assert error(best[0] * a, best[1] * b) >= error(*best)


def test_a_latency_below_zero_is_none():
    assert fit.fit_alpha_beta([1000, 2000], [1e-6, 3e-6]) == (0, pytest.approx(1000 / 1.2e-6, rel=0.2))


def test_bandwidths():
    assert fit.busbw_Bps("all_reduce", 1e9, 8, 2) == 1.75 * 5e8
    assert fit.busbw_Bps("all_gather", 1e9, 8, 2) == 0.875 * 5e8
    assert fit.busbw_Bps("broadcast", 1e9, 8, 2) == 5e8


def test_wrong_use():
    for sizes, seconds in (([], []), ([1, 1], [1, 2]), ([1, 2], [0, 1])):
        with pytest.raises(ValueError, match="use two, times above 0"):
            fit.fit_alpha_beta(sizes, seconds)
    with pytest.raises(ValueError, match="2000 bytes take no longer than 1000; measure larger sizes"):
        fit.fit_alpha_beta([1000, 2000], [2e-6, 1e-6])
    with pytest.raises(ValueError):
        fit.fit_alpha_beta([1, 2, 3], [1, 2])
