"""Regions, sums and rows: what two layouts must agree on before anything is compared."""

import math
import random

import pytest
import torch

from lib.doctor.numbers.region import Region, ranges_of
from lib.doctor.numbers.rows import hashes_of_places, hashes_of_rows
from lib.doctor.numbers.sketch import SUMS, draws_of, sums_of


def a_region(draw):
    """Of a random shape: along each dimension one range, or several in any order; sometimes a span of it flattened."""
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
    if draw.random() < 0.3:
        start = draw.randint(0, math.prod(shape))
        return Region.span(shape, start, draw.randint(start, math.prod(shape)))
    ranges = []
    for size in shape:
        borders = sorted(draw.sample(range(size + 1), min(size + 1, 2 * draw.randint(1, 2))))
        pieces = [*zip(borders[::2], borders[1::2], strict=False)]
        draw.shuffle(pieces)
        ranges.append(tuple(pieces))
    return Region(shape, tuple(ranges))


@pytest.mark.parametrize("seed", range(60))
def test_a_region_takes_what_it_says(seed):
    region = a_region(random.Random(seed))
    whole = torch.arange(region.of)
    expected = whole.view(region.grid)
    for dim, ranges in enumerate(region.ranges):
        index = [i for start, stop in ranges for i in range(start, stop)]
        expected = expected.index_select(dim, torch.tensor(index, dtype=torch.int64))
    assert region.fault() is None and region.numel == expected.numel()
    assert torch.equal(region.take(whole), expected.flatten())
    assert torch.equal(region.positions(), expected.flatten())
    written = torch.full_like(whole, -1)
    region.put(region.take(whole), written)
    assert torch.equal(region.take(written), expected.flatten())
    assert (written >= 0).sum() == region.numel


def test_positions_of_a_large_region_come_in_chunks(monkeypatch):
    monkeypatch.setattr("lib.doctor.numbers.region.CHUNK", 5)
    region = Region.along((4, 6), 1, [(4, 6), (0, 1)])
    chunks = list(region.chunks_of_positions())
    assert [len(chunk) for chunk in chunks] == [5, 5, 2]
    assert torch.equal(torch.cat(chunks), region.take(torch.arange(24)))


def test_a_list_of_indices_as_ranges():
    assert ranges_of(torch.tensor([0, 1, 2, 6, 7])) == [(0, 3), (6, 8)]
    assert ranges_of(torch.tensor([], dtype=torch.int64)) == []


def sums(x, region):
    return sums_of(x, draws_of(region))


def test_sums_of_shards_add_up_to_those_of_the_whole():
    x = torch.randn(12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = sums(x, Region.whole(x.shape))
    assert whole.shape == (SUMS,)
    columns = [Region.along((12, 10), 1, [(i, i + 5)]) for i in (0, 5)]
    spans = [Region.span((12, 10), 0, 37), Region.span((12, 10), 37, 120)]
    for regions in (columns, spans):
        total = sum(sums(region.take(x.flatten()), region) for region in regions)
        assert torch.allclose(total, whole, rtol=0, atol=1e-13)
    assert not torch.allclose(sums(x, Region.whole((10, 12))), whole)


def test_share_and_distance_can_be_read_from_sums():
    draw, region, ratios = torch.Generator().manual_seed(1), Region.whole((4096,)), []
    for _ in range(50):
        right = torch.randn(4096, generator=draw)
        mine = right + 0.1 * torch.randn(4096, generator=draw)
        a, b = (sums(x, region) for x in (mine, right))
        ratios.append(((a - b).norm() / b.norm() * right.norm() / (mine - right).norm()).item())
        assert torch.allclose(sums(2 * right, region), 2 * b)
    assert 0.6 < min(ratios) and max(ratios) < 1.6 and abs(sum(ratios) / 50 - 1) < 0.05


def test_one_wrong_row_of_many_is_seen_in_the_sums():
    right = torch.randn(4096, 16, generator=torch.Generator().manual_seed(2))
    mine = right.clone()
    mine[777] *= 10
    region = Region.whole(right.shape)
    apart = (sums(mine, region) - sums(right, region)).norm() / right.norm()
    assert 0.5 < apart / ((mine - right).norm() / right.norm()) < 1.6


def test_a_row_has_its_number_whatever_the_batch():
    x, y = torch.arange(24).view(4, 6), torch.arange(24).view(4, 6) + 1
    of_all = hashes_of_rows((x, y))
    assert of_all.unique().numel() == 4
    assert torch.equal(hashes_of_rows((x[2:], y[2:])), of_all[2:])
    assert torch.equal(hashes_of_rows((x.int(), y.short())), of_all)
    assert not torch.isin(hashes_of_rows((x.flip(1), y)), of_all).any()
    assert not torch.isin(hashes_of_rows((y, x)), of_all).any()
    wide = torch.randn(4, 3, dtype=torch.float64).float().double()
    assert torch.equal(hashes_of_rows((wide,)), hashes_of_rows((wide.float(),)))
    assert hashes_of_rows((torch.tensor([0.5, -0.5, 0.0, -0.0]),)).unique().numel() == 3


def test_parts_of_rows_have_the_numbers_of_their_places():
    x, y = torch.randint(50, (2, 3, 8), generator=torch.Generator().manual_seed(3))
    whole = sorted(hashes_of_places((x, y)).tolist())
    zigzag = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]
    parts = [hashes_of_places((x[:, own], y[:, own])).tolist() for own in zigzag]
    assert sorted(sum(parts, [])) == whole
    shifted = hashes_of_places((x[:, zigzag[0]], y[:, zigzag[0]].roll(-1, 1))).tolist()
    assert sorted(shifted + parts[1]) != whole
