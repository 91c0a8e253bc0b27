"""What test files share: how long a test may take, a machine watched for what a run leaves behind, notebooks."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zipfile
from multiprocessing import resource_tracker
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from tests.on_time import Late

ROOT = Path(__file__).parents[1]

# What a shell starts in the background ignores Ctrl-C, and so do its children: those that the tests interrupt, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # as a rank: threads of two processes on two cores wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

RERUN_S = 2.0  # from a time that was missed to the next try


def pytest_addoption(parser):
    parser.addoption("--longest-s", type=float, default=60, help="seconds that a test may take; slow ones say why")
    parser.addoption(
        "--part", choices=("all", "quick", "thorough"), default="all", help="thorough: what quick leaves"
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ("alone", "slow", "thorough", "timed") and not mark.args:
                raise pytest.UsageError(f'{item.nodeid} is marked as {mark.name}, but not why: {mark.name}("...")')
        if item.get_closest_marker("timed"):  # what else runs on the machine can only make a time longer
            item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=RERUN_S))
    if (part := config.getoption("part")) != "all":
        parts = {"quick": [], "thorough": []}
        for item in items:
            parts["thorough" if is_thorough(item, parts["quick"]) else "quick"].append(item)
        items[:] = parts.pop(part)
        config.hook.pytest_deselected(items=[item for others in parts.values() for item in others])


def is_thorough(item, quick: list) -> bool:
    """Marked so; but of a test with many parameters the first few, `keep`, are quick."""
    mark = item.get_closest_marker("thorough")
    return mark is not None and sum(item.function is one.function for one in quick) >= mark.kwargs.get("keep", 0)


SPIN = """
import time
began_s, worked_s = time.perf_counter(), time.process_time()
while time.process_time() < worked_s + 0.3: pass
print(time.perf_counter() - began_s)
"""
BUSY = "not measured here: the machine was busy, a loop took {:.1f} times its processor time"


def busy() -> float:
    """How much longer a loop on each core takes than its processor time: about 1 where nothing else runs."""
    loops = [
        subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True)
        for _ in range(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    ]
    return sum(float(loop.communicate()[0]) for loop in loops) / len(loops) / 0.3


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Judge a test by its time only where the machine is quiet, or must be ($INSIST_ON_TIME, which .ci/run sets).

    Only a bound on time is excused (`on_time`): a wrong text or verdict of a test that measures is a failure anywhere.
    """
    report = yield
    insists, longest_s = os.environ.get("INSIST_ON_TIME"), item.config.getoption("longest_s")
    was_late = report.failed and item.get_closest_marker("timed") and call.excinfo.errisinstance(Late)
    if was_late and not insists and (times := busy()) > 1.3:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: " + BUSY.format(times))
    is_long = insists and call.duration > longest_s and not item.get_closest_marker("slow")
    if report.passed and is_long and call.duration > longest_s * busy():
        report.outcome = "failed"
        report.longrepr = (
            f"It passed, but its {call.when} took {call.duration:.0f} s, and a test may take {longest_s:g} s: make it "
            'shorter, or say why it cannot be, @pytest.mark.slow("...").'
        )
    return report


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "said":
                terminalreporter.write_line(f"\n{text}")


@pytest.fixture
def say(record_property):
    """Prints at the end of all tests, in whatever process this one runs."""
    return lambda text: record_property("said", text)


@pytest.fixture
def million_s():
    """A yardstick for times in Python, of this machine and hour: processor time of a loop with a million additions."""

    def loop():
        began, total = time.process_time(), 0
        for i in range(1_000_000):
            total += i
        return time.process_time() - began

    return min(loop() for _ in range(3))


@pytest.fixture
def hosts(tmp_path):
    """Two hosts in network namespaces; skipped where there can be none."""
    from tests.lib.hosts import TwoHosts, cannot

    if why := cannot():
        pytest.skip(why)
    with TwoHosts(tmp_path) as both:
        yield both


def left_behind() -> set:
    """Processes below this one, beside the two servers, and every temporary file but torch's cache, for all to use."""
    from lib.runtime import server

    servers = {server._server.pid, resource_tracker._resource_tracker._pid}
    processes = {p for p in psutil.Process().children(recursive=True) if p.pid not in servers}
    return {f"process {p.pid}: {p.name()}" for p in processes} | {
        f"file {f}" for f in os.listdir(tempfile.gettempdir()) if not f.startswith("torchinductor_")
    }


def open_files() -> list[str]:
    """What this process holds open: files, pipes, sockets."""
    fds = []
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            fds.append(f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:  # the one that listed the folder
            pass
    return fds


def nothing(world):
    pass


@pytest.fixture
def private_temp_folder(tmp_path_factory):
    """Temporary files of the test's runs go where no other's are; the server's socket, made once, stays outside."""
    from lib.runtime.server import start_server

    start_server()
    with patch.object(tempfile, "tempdir", str(tmp_path_factory.mktemp("temp"))):
        yield


@pytest.fixture
def machine(private_temp_folder):
    """The test leaves no process, no file, no descriptor, no socket; and after it a run works."""
    from lib.launch import run
    from lib.runtime import server

    server.start_server()
    if server._server.pid not in _warm:  # the first test, or a file of lib was edited meanwhile
        run(nothing, 2)
        _warm.add(server._server.pid)
    gc.collect()  # sockets of a kernel that an earlier test has talked to
    before = open_files()
    assert not left_behind()
    yield
    assert not left_behind()
    assert sorted(open_files()) == sorted(before)
    assert run(lambda world: world.rank, 2, timeout_s=20) == [0, 1]


_warm: set = set()


@pytest.fixture
def start_notebook(tmp_path):
    """Starts real kernels: each gives `cell(text, interrupt_after_s)` -> (error name, its text, stdout, stderr)."""
    jupyter_client = pytest.importorskip("jupyter_client")
    started = []

    def start(folder: Path = tmp_path, **environment: str):
        manager = jupyter_client.KernelManager(kernel_name="python3")
        manager.kernel_spec.argv[0] = sys.executable
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **environment}
        del variables["PYTEST_CURRENT_TEST"]  # or ipykernel would not show what goes past Python
        manager.start_kernel(cwd=str(folder), env=variables)
        client = manager.blocking_client()
        started.append((manager, client))
        client.start_channels()
        client.wait_for_ready(timeout=60)

        def cell(text, interrupt_after_s=None):
            said, error = {"stdout": "", "stderr": ""}, ["", ""]

            def hear(message):
                if message["msg_type"] == "stream":
                    said[message["content"]["name"]] += message["content"]["text"]
                elif message["msg_type"] == "error":
                    error[:] = message["content"]["ename"], message["content"]["evalue"]
                elif message["content"].get("execution_state") == "busy" and interrupt_after_s:
                    threading.Timer(interrupt_after_s, manager.interrupt_kernel).start()

            client.execute_interactive(textwrap.dedent(text), timeout=60, output_hook=hear)
            return *error, said["stdout"], said["stderr"]

        cell.pid = manager.provisioner.pid
        return cell

    yield start
    for manager, client in started:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def nothing_is_trained(monkeypatch):
    """The command line must refuse before anything starts."""
    from lib import train

    def fail(*args, **kwargs):
        raise AssertionError("this must fail before anything is trained")

    for name in ("train", "run", "init"):
        monkeypatch.setattr(train, name, fail)


@pytest.fixture
def own_progress(monkeypatch, tmp_path):
    """Checks have a record and a session of their own, and an exercise that is in no chapter."""
    from course import check as checks
    from course.check import record
    from course.check.catalogue import EXERCISES
    from tests.course.bytes_sent import BYTES

    monkeypatch.setattr(record, "place", lambda: tmp_path / "progress.json")
    monkeypatch.setattr(record, "_met", {})
    monkeypatch.setattr(checks, "_session", {})
    monkeypatch.setattr(checks, "_judged", {})
    monkeypatch.setitem(EXERCISES, BYTES.id, BYTES)
    for variable in ("CHECK_STRICT", "NBGRADER_EXECUTION"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def open_folder():
    """A folder below one that every user may enter; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def one_thread():
    """In this process torch computes with one thread, as in a rank."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; where there is none, a test that asks for it is skipped."""
    from tools.browser import chromium, open_browser

    if chromium() is None:
        pytest.skip("no Chromium")
    with open_browser() as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    """Opens HTML as a page read from the disk, with the network off; at the end none had complaints or asked a host."""
    contexts, complaints = [], []

    def hear(message):
        a_font = "font" in message.text + message.location["url"]  # which a page read from the disk may not load
        if message.type in ("error", "warning") and not a_font:
            complaints.append(message.text)

    def open_page(html: str | Path, address: str = "", width: int = 1280, script: str = "", **options):
        """Of the text or the file; `script` runs before the page's own, `options` are those of a browser's context."""
        if isinstance(html, str):
            (tmp_path / "page.html").write_text(html, encoding="utf-8")
            html = tmp_path / "page.html"
        quiet = {"viewport": {"width": width, "height": 900}, "offline": True, "reduced_motion": "reduce"}
        contexts.append(browser.new_context(**quiet | options))
        contexts[-1].add_init_script(script)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", hear)
        page.on("request", lambda asked: complaints.append(asked.url) if asked.url.startswith("http") else None)
        page.goto(html.as_uri() + address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    """Folders of all homeworks, the zips beside what is in them: it takes seconds."""
    from course.release.__main__ import main

    out = tmp_path_factory.mktemp("release")
    assert main([*map(str, sorted(ROOT.glob("course/assignments/*.json"))), "--out", str(out)]) == 0
    for path in out.glob("*/*.zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(path.with_suffix(""))
    return out
