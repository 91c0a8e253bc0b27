"""How fast the links and the GPUs should be, as the reader says it: `--expect 400Gb`, or `--gpu h100`.

The problem: a cluster all of whose links are slow has no odd one. The idea: somebody must say a number. `--expect` is
what one link between two hosts should give, in one direction; `--gpu` takes a row of the table of `lib.cost.hardware`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lib.cost.hardware import GPUS, SPEEDS, amount, gpu_name
from lib.cost.models import known


@dataclass(frozen=True)
class Expected:
    """Figures of a data sheet; None where nobody gave one.

    Args:
        between_Bps: bytes per second of a link between hosts, one direction.
        within_Bps: of a link within a host.
        flops: operations per second of a matmul in 16 bit.
        between_said: the option that says `between_Bps`.
        gpu_said: the option that says the others.
    """

    between_Bps: float | None = None  # noqa: N815 a unit
    within_Bps: float | None = None  # noqa: N815 a unit
    flops: float | None = None
    between_said: str = ""
    gpu_said: str = ""

    @classmethod
    def of(cls, expect: str | None, gpu: str | None) -> Expected:
        """What the two options say; `--expect` replaces the network of `--gpu`.

        Raises:
            ValueError: a speed without a unit, or a GPU that is not in the table.
        """
        expected = cls()
        if gpu:
            name = known(gpu_name(gpu), GPUS, "GPU", "give --expect, such as 400Gb, for the links between hosts")
            device, said = GPUS[name], f"--gpu {name}"
            flops = device.matmul_flops or device.peak_flops
            expected = cls(device.network_Bps, device.link_Bps, flops, said, said)
        if expect:
            units = SPEEDS | {"MB": 1e6, "Mb": 1e6 / 8, "Mbit": 1e6 / 8, "MiB": 2**20}
            between_Bps = amount(expect, units, "--expect 400Gb, or 50GB/s")
            expected = replace(expected, between_Bps=between_Bps, between_said=f"--expect {expect}")
        return expected


def speed_text(Bps: float) -> str:  # noqa: N803 a unit
    """A speed as a reader counts it: `5 MB/s`, `50 GB/s`."""
    return f"{Bps / 1e9:.3g} GB/s" if Bps > 999.5e6 else f"{Bps / 1e6:.3g} MB/s"
