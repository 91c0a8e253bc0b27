"""Whom the doctor blames after a connection broke: the rank that fell silent, and none that still writes its row."""

import marshal
import threading
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from lib.doctor import impatient
from lib.doctor.page import Examination
from lib.runtime.hang import RUNNING
from lib.torchrun.meeting import Member

SAID = {"device": "cpu", "cores": "8", "threads": "1", "torch": "2.9"}
PLACES = [("node0", "a", ""), ("node1", "b", "10.0.0.2"), ("node1", "b", "10.0.0.2")]
MEMBERS = [Member(*place, settings=SAID) for place in PLACES]
BROKE = "Connection closed by peer [10.0.0.2]:40123"


class Store:
    """The part of torchrun's store that a watchdog needs, in this process."""

    def __init__(self):
        self.rows, self.is_lost = {}, False

    def clone(self):
        return self

    def set_timeout(self, limit):
        pass

    def set(self, key, value):
        self.rows[key] = value

    def get(self, key):
        return self.rows[key]

    def check(self, keys):
        return all(key in self.rows for key in keys)

    def add(self, key, n):
        self.rows[key] = self.rows.get(key, 0) + n
        return self.rows[key]

    def multi_get(self, keys):
        if self.is_lost:
            raise dist.DistNetworkError("the store is gone")
        return [self.rows[key] for key in keys]


@contextmanager
def watched(monkeypatch, alive):
    """The watchdog of rank 0; the ranks that live write their rows."""
    monkeypatch.setattr(impatient, "DEAD_S", 0.6)
    monkeypatch.setattr(impatient, "FIND_S", 1.5)
    monkeypatch.setattr(impatient.Impatient, "beat_s", 0.1)
    monkeypatch.setattr(impatient.Impatient, "_hear_torchrun", lambda self: -1)  # the signals of pytest stay
    monkeypatch.setattr(impatient.Impatient, "_was_told_to_end", lambda self: False)
    store, ends = Store(), threading.Event()
    for rank in (1, 2):
        store.set(f"row {rank}", marshal.dumps((1,)))

    def beat():
        for number in range(2, 10**6):
            if ends.wait(0.1):
                return
            for rank in alive:
                store.set(f"row {rank}", marshal.dumps((number,)))

    others = threading.Thread(target=beat, daemon=True)
    others.start()
    report = Examination(MEMBERS, "gloo")
    watchdog = impatient.Impatient(report, None, store, 0, MEMBERS, 15.0, "eth0")
    watchdog.table.state(RUNNING)
    try:
        yield watchdog, store
    finally:
        watchdog.stop()
        ends.set()
        others.join()


def test_the_rank_that_fell_silent_died(monkeypatch):
    with watched(monkeypatch, alive=[1]) as (watchdog, _):
        ending = watchdog.who_died(BROKE)
    assert (ending.kind, ending.ranks) == ("died", (2,)) and ending.text.startswith("rank 2 on node1 died: it has")
    assert BROKE in ending.text and "exit code -9" in ending.text


def test_no_rank_that_lives_is_blamed(monkeypatch):
    with watched(monkeypatch, alive=[1, 2]) as (watchdog, _):
        ending, failed = watchdog.who_died(BROKE), watchdog.who_died("CUDA out of memory")
    assert ending.kind == "connection" and "all ranks are alive" in ending.text
    assert failed.text == "rank 0 on node0 failed: CUDA out of memory"


def test_a_store_that_is_gone_names_its_host(monkeypatch):
    with watched(monkeypatch, alive=[1, 2]) as (watchdog, store):
        store.is_lost = True
        ending = watchdog.who_died(BROKE)
    assert (ending.kind, ending.ranks) == (
        "died",
        (0,),
    ) and "rank 0 on node0 died, or the torchrun there" in ending.text


def test_each_host_is_told_once_and_torchrun_in_its_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "word.json"))
    with watched(monkeypatch, alive=[1, 2]) as (watchdog, store):
        ending = impatient.Ending("rank 2 on node1 died", (2,), "died")
        watchdog.tell(ending)
        first = capsys.readouterr()
        watchdog.tell(ending)
        second = capsys.readouterr()
        store.rows.pop("told on a")
        watchdog.tell(ending)
        third = capsys.readouterr()
    assert "rank 2 on node1 died" in first.out and "not judged" in first.out, "the page"
    assert not second.out + second.err
    assert third.err.strip() == "python -m lib.doctor: rank 2 on node1 died" and not third.out
    assert "rank 2 on node1 died" in (tmp_path / "word.json").read_text()


@pytest.mark.parametrize("told", [False, True])
def test_torchruns_wish_that_a_rank_ends_is_granted_later(monkeypatch, told):
    with watched(monkeypatch, alive=[1, 2]) as (watchdog, _):
        ended = []
        monkeypatch.setattr(impatient.os, "_exit", ended.append)
        monkeypatch.setattr(watchdog, "_was_told_to_end", lambda: told)
        monkeypatch.setattr(impatient, "GRACE_S", 0.3)
        watchdog._write()
        assert not ended, "it goes on for some seconds, and its row shows it"
        threading.Event().wait(0.6)
        watchdog._write()
        assert bool(ended) is told
