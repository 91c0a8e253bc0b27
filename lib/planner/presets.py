"""Models, GPUs and stacks by their usual names.

The constants of a stack were chosen once, by hand, among round numbers. One constant per GPU is calibrated on a
published run (`CALIBRATED`): the fraction of the peak that a large matmul reaches. Chapter 14 tests all of them on the
remaining runs.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from lib.cost.hardware import DEVICES, Device
from lib.cost.sizes import MODELS, RECIPES, ModelShape
from lib.planner.training import Stack

_NAMES = {"llama-7b": "7B", "llama-13b": "13B", "llama-70b": "70B", "gpt-175b": "175B", "llama-405b": "405B"}
PRESET_MODELS: dict[str, ModelShape] = {name: MODELS[short] for name, short in _NAMES.items()}
GPUS: dict[str, Device] = {name.split()[0].lower(): device for name, device in DEVICES.items()}

# Rows that the planner predicts exactly.
CALIBRATED = {"a100": "Korthikanti 175B selective", "h100": "Llama 3 405B 8,192 GPUs"}
SHARES = {"a100": (0.7683, 0.33), "h100": (0.6498, 0.50)}  # of the peak: by matmuls, by fused attention

BF16 = RECIPES["mixed Adam"]
# Overlap and memory of the software; Narayanan et al. 2021 and Korthikanti et al. 2022 used megatron-2021.
STACKS = {
    "megatron-2021": {"fused_attention": False, "exposed_zero3": 1.0},
    "megatron": {"exposed_tp": 0.3, "exposed_pp": 0.1, "overlaps_dp": True},
    "llama3": {"overlaps_dp": True, "spare_activations": 0.8},  # otherwise none of its runs would fit
    "aleph-alpha": {"recipe": BF16, "spare_activations": 1.3},
    "fsdp": {"recipe": BF16, "overlaps_dp": True},
}


def stack_for(name: str, gpu: str) -> Stack:
    """A stack on a GPU; a GPU without calibration gets the constants of the H100, whose kernels are the newest."""
    matmul, attention = SHARES.get(gpu, SHARES["h100"])
    return replace(Stack(matmul, attention), **STACKS[known(name, STACKS, "stack")])


def known(name: str, among: dict, what: str) -> str:
    """Return the name if it exists.

    Raises:
        ValueError: it does not exist; the message gives the nearest names.
    """
    if name in among:
        return name
    near = get_close_matches(str(name).lower(), among, n=3, cutoff=0.3) or list(among)
    raise ValueError(f"there is no {what} {name!r}; did you mean {' or '.join(near)}?")
