"""Published figures of devices and their links.

The problem: the number on the first page of a data sheet is rarely the one that a formula takes. An H100's
"1,979 TFLOP/s" requires matrices with zeros in half of their elements, "900 GB/s" adds both directions of a link, and
a network of "400" is in bits. The idea: one table, in one convention. FLOP/s are of dense 16-bit matmuls, links count
one direction, all sizes are in bytes, and each row has its source.

None of it was measured here. A device reaches less than its peak: see `matmul_flops`, a published measurement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TABLES = "Bekman, Machine Learning Engineering Open Book, tables of 2026-08, which cite NVIDIA's data sheets"
_V100 = f"link: {_TABLES}; the rest as commonly quoted from NVIDIA's data sheet (the sheet itself was not read)"
_TITAN = "memory, its bandwidth and 500 W instead of 700: torchtitan, benchmarks of 2024-12; the rest as the H100"


@dataclass(frozen=True)
class Device:
    """One GPU.

    Args:
        memory_bytes: its memory, in decimal bytes as it is sold.
        peak_flops: operations per second, dense, bfloat16 (float16 on the V100).
        memory_Bps: bytes per second between the GPU and its memory.
        link_Bps: bytes per second between GPUs of a node, one direction.
        network_Bps: bytes per second between nodes, one direction, in a usual cluster; None where it varies.
        matmul_flops: operations per second of the fastest published matmul; None where unknown.
        source: source of the row.
    """

    memory_bytes: float
    peak_flops: float
    memory_Bps: float  # noqa: N815 a unit
    link_Bps: float  # noqa: N815 a unit
    network_Bps: float | None  # noqa: N815 a unit
    matmul_flops: float | None
    source: str


DEVICES = {
    "V100 32 GB": Device(32e9, 125e12, 0.9e12, 150e9, None, None, _V100),
    "A100 80 GB": Device(80e9, 312e12, 2.0e12, 300e9, 25e9, 271.2e12, _TABLES + "; network: Narayanan et al. 2021"),
    "H100 80 GB": Device(80e9, 989e12, 3.35e12, 450e9, 50e9, 794.5e12, _TABLES + "; network: Llama 3, 2024"),
    "H100-500W 96 GB": Device(96e9, 989e12, 2.4e12, 450e9, 50e9, None, _TITAN),
    "H200 141 GB": Device(141e9, 989e12, 4.8e12, 450e9, 50e9, 794.5e12, _TABLES),
    "B200 180 GB": Device(180e9, 2250e12, 8.0e12, 900e9, 50e9, 1745e12, _TABLES),
}

GPUS: dict[str, Device] = {
    name.split()[0].lower(): device for name, device in DEVICES.items()
}  # as options name them

BYTES = {"GB": 1e9, "GiB": 2**30, "TB": 1e12}
SPEEDS = BYTES | {"Gb": 1e9 / 8, "Gbit": 1e9 / 8, "Tb": 1e12 / 8}
FLOPS = {"TF": 1e12, "TFLOP": 1e12, "TFLOPS": 1e12, "PF": 1e15, "PFLOP": 1e15, "PFLOPS": 1e15}
TOKENS = {"M": 1e6, "B": 1e9, "T": 1e12, "": 1}


def amount(text: str, units: dict[str, float], such_as: str) -> float:
    """The number that a text such as `400Gb/s` stands for: bytes, operations or tokens (per second).

    Raises:
        ValueError: no number, or another unit; the message has `such_as`, an example.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([A-Za-z]*?)(?:/s|ps)?", text)
    if match and units is BYTES and match[2] in SPEEDS and match[2] not in BYTES:
        whole = float(match[1])
        raise ValueError(f"{text} are gigabits, {whole / 8:g} gigabytes; memory is sold in bytes: {whole:g}GB")
    if not match or match[2] not in units or not float(match[1]):
        raise ValueError(f"{text} needs a number and a unit: {such_as}")
    return float(match[1]) * units[match[2]]


def device_text(device: Device, per_node: int) -> str:
    """The figures of a GPU and its links, in a sentence; the network per GPU and per node."""
    memory, link, network = (n / 1e9 for n in (device.memory_Bps, device.link_Bps, device.network_Bps or 0))
    between = f"network {network:g} GB/s per GPU, {network * per_node:g} GB/s per node" if network else "no network"
    return (
        f"{device.peak_flops / 1e12:g} TFLOP/s in 16 bit, {device.memory_bytes / 1e9:g} GB at {memory:g} GB/s; "
        f"one direction: link {link:g} GB/s among {per_node} GPUs, {between}"
    )
