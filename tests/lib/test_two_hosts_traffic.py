"""What crosses the cable between two hosts is what the plan says, and so is the time of a step on a slow cable.

The two hosts are those of `hosts.py`. The counters of the interface are read in the run, at the beginning of two steps:
what starts a run, and the headers of packets, do not count.
"""

import json
from statistics import median

import pytest

from lib.layout import Layout
from lib.model import GPTConfig
from lib.planner.plan_messages import bytes_out_of_a_node
from lib.train import planned
from lib.training.config import TrainConfig
from tests.lib.hosts import ADDRESSES

pytestmark = pytest.mark.slow("two torchruns, whose processes import torch on two cores")
FIRST, LAST = 2, 42
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 20 with a time stamp of 12
COUNTED = f"""
import json, os, sys
from pathlib import Path
from lib.training import loop

folder, original = Path(sys.argv.pop(1)), loop.train_step
counters = Path("/sys/class/net/cable0/statistics")

def counted(model, tokens, step, config):
    if step in ({FIRST}, {LAST}) and os.environ["LOCAL_RANK"] == "0":
        seen = {{name: int((counters / f"tx_{{name}}").read_text()) for name in ("bytes", "packets")}}
        (folder / f"{{os.uname().nodename}}-{{step}}.json").write_text(json.dumps(seen))
    return original(model, tokens, step, config)

loop.train_step = counted
from lib.train import main
main()
"""


def sent_in_a_step(folder, host):
    """Bytes of the mean step, without the headers of packets."""
    before, after = (json.loads((folder / f"{host}-{step}.json").read_text()) for step in (FIRST, LAST))
    sent = {name: after[name] - before[name] for name in before}
    return (sent["bytes"] - HEADER_BYTES * sent["packets"]) / (LAST - FIRST)


def trained(hosts, folder, layout, ranks, steps, model=None):
    """Train on both hosts; the seconds of each step."""
    program, report = folder / "counted.py", folder / "report.json"
    program.write_text(COUNTED)
    options = {**layout.sizes, "ep": layout.ep, "attention": layout.attention, **(model or {})}
    settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    words = f"{program} {folder} {settings} --steps {steps} --validate-every 0 --report {report}"
    both = [hosts.torchrun(host, words, ranks=ranks) for host in ADDRESSES]
    assert [one.wait(300) for one in both] == [0, 0], hosts.said("node0") + hosts.said("node1")
    return json.loads(report.read_text())["ranks"][0]["step_s"]


def planned_bytes(layout, ranks, model=None):
    """Bytes that the plan lets leave the node that sends most, in a step."""
    config = TrainConfig(model=GPTConfig(**model or {}), layout=layout)
    return sum(bytes_out_of_a_node(planned(config), ranks).values())


@pytest.mark.thorough("two torchruns", keep=0)
@pytest.mark.parametrize(
    ("axes", "ranks"),
    [
        pytest.param({"tp": 2, "dp": 2}, 2, marks=pytest.mark.hosts("TP inside, DP across")),
        pytest.param({"tp": 2, "pp": 2}, 2),  # TP inside, PP across
        pytest.param({"tp": 2, "cp": 2, "attention": "ring"}, 2, marks=pytest.mark.hosts("TP inside, a ring across")),
        pytest.param({"tp": 4}, 2),  # TP across: of the ring of four ranks one link leaves each host
    ],
    ids=str,
)
def test_what_crosses_the_cable(hosts, tmp_path, axes, ranks, say):
    layout = Layout(**axes)
    trained(hosts, tmp_path, layout, ranks, LAST + 1)
    sent, plan = max(sent_in_a_step(tmp_path, host) for host in ADDRESSES), planned_bytes(layout, ranks)
    say(f"{axes}: {sent:,.0f} bytes of a step leave a host; the plan says {plan:,.0f}, {sent / plan - 1:+.2%}")
    assert sent == pytest.approx(plan, rel=0.01)


@pytest.mark.hosts("all-to-all of experts across")
@pytest.mark.thorough("two torchruns", keep=0)
def test_what_experts_send_across_the_cable(hosts, tmp_path, say):
    """Each token chooses every expert, so that the table of rows is even and the plan exact."""
    layout, every = Layout(dp=4, ep=4), {"experts": 4, "top_k": 4, "d_expert": 16}
    trained(hosts, tmp_path, layout, 2, LAST + 1, every)
    sent, plan = max(sent_in_a_step(tmp_path, host) for host in ADDRESSES), planned_bytes(layout, 2, every)
    say(f"ep 4: {sent:,.0f} bytes of a step leave a host; the plan says {plan:,.0f}, {sent / plan - 1:+.2%}")
    assert sent == pytest.approx(plan, rel=0.01)


@pytest.mark.thorough("two torchruns, a slow cable")
def test_a_step_on_a_slow_cable(hosts, tmp_path, say):
    """Tensor parallelism across hosts hides nothing: the step without the cable, and the bytes over the rate."""
    layout, bits_per_s = Layout(tp=2), 20e6
    free_s = median(trained(hosts, tmp_path, layout, 1, 12)[3:])
    hosts.limit(f"{bits_per_s / 1e6:.0f}mbit")
    slow_s = median(trained(hosts, tmp_path, layout, 1, 12)[3:])
    plan_s = free_s + planned_bytes(layout, 1) * 8 / bits_per_s
    say(f"a step of {free_s * 1e3:.0f} ms takes {slow_s * 1e3:.0f} ms at 20 Mbit/s; predicted {plan_s * 1e3:.0f} ms")
    assert slow_s == pytest.approx(plan_s, rel=0.15)
