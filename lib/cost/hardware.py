"""Published figures of devices and their links.

The problem: the number on the first page of a data sheet is rarely the one that a formula takes. An H100's
"1,979 TFLOP/s" requires matrices with zeros in half of their elements, "900 GB/s" adds both directions of a link, and
a network of "400" is in bits. The idea: one table, in one convention. FLOP/s are of dense 16-bit matmuls, links count
one direction, all sizes are in bytes, and each row has its source.

A card without a fast link has its PCIe slot as link: messages between such cards pass through the host. None of it was
measured here. A device reaches less than its peak: see `matmul_flops`, a published measurement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TABLES = "Bekman, Machine Learning Engineering Open Book, tables of 2026-08, which cite NVIDIA's data sheets"
_V100 = f"link: {_TABLES}; the rest as commonly quoted from NVIDIA's data sheet (the sheet itself was not read)"
_TITAN = "memory, its bandwidth and 500 W instead of 700: torchtitan, benchmarks of 2024-12; the rest as the H100"
# A data sheet that is "quoted by" somebody was read there.
_FASTEST = "fastest matmul: github mag-/gpu_benchmark, README"
_PCIE = "link: a PCIe slot of 16 lanes, 128b/130b, which the cards share through the host"
_A100_40 = (
    f"memory: 40 GB at 1,555 GB/s (NVIDIA's data sheet, as quoted by dealers); the chip as with 80 GB; {_TABLES}"
)
_GH200 = (
    f"{_TABLES}, 96 GB of HBM3 (fastest matmul: of the version with 141 GB); one GPU per superchip, so a node of one; "
    "`--per-node 4` where NVLink joins four, as on Alps (github eth-cscs/cscs-docs, docs/alps/hardware.md)"
)
_NVL72 = (
    "memory and 2.45 PFLOP/s dense: NVIDIA-NeMo, Megatron-Bridge performance summaries of 2025 and 2026 (those runs "
    f"use 64 GPUs of an NVLink domain); 72 GPUs to a domain, and NVLink 5: {_TABLES}; 8 TB/s: verda.com, GB300 NVL72; "
    f"network: a card of 400 Gb/s per GPU ({_TABLES}), of 800 on GB300 (glennklockwood.com, B300: 72 ConnectX-8)"
)
_MI300X = (
    f"{_TABLES}; peak: the clock times the units; seven links of 64 GB/s in each direction, one to each GPU of a node"
)
_A6000 = (
    "NVIDIA's data sheet, as quoted by servethehome.com and microway.com: 154.8 TFLOP/s without sparsity; two cards "
    f"joined by a bridge have 56 GB/s: `--per-node 2 --link 56GB`; {_PCIE}; {_FASTEST}"
)
_L40S = f"{_TABLES}: 362 TFLOP/s without sparsity, 864 GB/s; {_PCIE}; {_FASTEST}"
_RTX40 = f"NVIDIA's Ada white paper, as quoted by hmc-tech.com: FP16 with FP32 sums; {_PCIE}; {_FASTEST}"
_RTX50 = f"NVIDIA's RTX Blackwell white paper, as quoted by spheron.network: a quarter of 838 TFLOP/s; {_PCIE}"
_PCIE_LANES_Bps = 16 * 128 / 130 / 8  # noqa: N816 bytes of a slot per transfer of a lane
PCIE4_Bps, PCIE5_Bps = 16e9 * _PCIE_LANES_Bps, 32e9 * _PCIE_LANES_Bps  # noqa: N816 31.5 and 63 GB/s, one direction


@dataclass(frozen=True)
class Device:
    """One GPU.

    Args:
        memory_bytes: its memory, in decimal bytes as it is sold.
        peak_flops: operations per second, dense, bfloat16 (float16 on the V100).
        memory_Bps: bytes per second between the GPU and its memory.
        link_Bps: bytes per second from a GPU to the GPUs of its node, one direction.
        network_Bps: bytes per second between nodes, one direction, in a usual cluster; None where it varies.
        matmul_flops: operations per second of the fastest published matmul; None where unknown.
        source: source of the row.
        per_node: GPUs that share the link in a usual cluster.
        peers: 0: a switch joins the GPUs of a node; otherwise each has a link to each of so many peers, and a group of
            fewer uses only the links among its own GPUs.
    """

    memory_bytes: float
    peak_flops: float
    memory_Bps: float  # noqa: N815 a unit
    link_Bps: float  # noqa: N815 a unit
    network_Bps: float | None  # noqa: N815 a unit
    matmul_flops: float | None
    source: str
    per_node: int = 8
    peers: int = 0

    def link_among(self, ranks: int) -> float:
        """Bytes per second that a GPU sends to a group of so many in its node, one direction."""
        return self.link_Bps * (min(ranks - 1, self.peers) / self.peers if self.peers and ranks > 1 else 1)


DEVICES = {
    "V100 32 GB": Device(32e9, 125e12, 0.9e12, 150e9, None, None, _V100),
    "A100-40GB 40 GB": Device(40e9, 312e12, 1.555e12, 300e9, None, 271.2e12, _A100_40),
    "A100 80 GB": Device(80e9, 312e12, 2.0e12, 300e9, 25e9, 271.2e12, _TABLES + "; network: Narayanan et al. 2021"),
    "H100 80 GB": Device(80e9, 989e12, 3.35e12, 450e9, 50e9, 794.5e12, _TABLES + "; network: Llama 3, 2024"),
    "H100-500W 96 GB": Device(96e9, 989e12, 2.4e12, 450e9, 50e9, None, _TITAN),
    "GH200 96 GB": Device(96e9, 989e12, 4.0e12, 450e9, None, 828.6e12, _GH200, per_node=1),
    "H200 141 GB": Device(141e9, 989e12, 4.8e12, 450e9, 50e9, 794.5e12, _TABLES),
    "B200 180 GB": Device(180e9, 2250e12, 8.0e12, 900e9, 50e9, 1745e12, _TABLES),
    "GB200 186 GB": Device(186e9, 2450e12, 8.0e12, 900e9, 50e9, None, _NVL72, per_node=72),
    "GB300 288 GB": Device(288e9, 2450e12, 8.0e12, 900e9, 100e9, None, _NVL72, per_node=72),
    "MI300X 192 GB": Device(192e9, 1307.4e12, 5.3e12, 448e9, None, 668.4e12, _MI300X, peers=7),
    "A6000 48 GB": Device(48e9, 154.8e12, 0.768e12, PCIE4_Bps, None, 131.2e12, _A6000),
    "L40S 48 GB": Device(48e9, 362e12, 0.864e12, PCIE4_Bps, None, 252.0e12, _L40S),
    "RTX4090 24 GB": Device(24e9, 165.2e12, 1.008e12, PCIE4_Bps, None, 178.8e12, _RTX40),
    "RTX5090 32 GB": Device(32e9, 209.5e12, 1.792e12, PCIE5_Bps, None, None, _RTX50),
}

GPUS: dict[str, Device] = {
    name.split()[0].lower(): device for name, device in DEVICES.items()
}  # as options name them
# Words of a vendor, and sizes of the memory that a name may have; a PCIe version is a different card.
_ADORNED = r"nvidia|amd|geforce|instinct|tesla|sxm\d?|hbm3e?|nvl72"


def gpu_name(text: str) -> str:
    """The name in `GPUS` of a GPU as people write it: `4090`, `RTX 4090`, `H100 80GB`, `NVIDIA A100-SXM4-40GB`.

    A text that is none of them is returned as it is, in small letters.
    """
    short = re.sub(rf"({_ADORNED})|[-_ ]", "", text.lower())
    for name, device in GPUS.items():
        plain = name.replace("-", "")
        known_as = {plain, plain.removeprefix("rtx"), "rtx" + plain, f"{plain}{device.memory_bytes / 1e9:g}gb"}
        if short in known_as:
            return name
    return text.lower()


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
    how = " (a PCIe slot)" if device.link_Bps in (PCIE4_Bps, PCIE5_Bps) else ""
    how = f" ({link / device.peers:g} to each)" if device.peers else how
    return (
        f"{device.peak_flops / 1e12:g} TFLOP/s in 16 bit, {device.memory_bytes / 1e9:g} GB at {memory:g} GB/s; "
        f"one direction: link {round(link, 1):g} GB/s{how} among {per_node} GPUs, {between}"
    )
