"""Matmuls in 8 bit: how much faster those of the blocks are.

FP8 multiplies twice as many numbers per second as 16 bit by the data sheet, and its software casts and scales them
first. The idea: a constant per GPU, the speed of the blocks' matmuls over that in 16 bit, calibrated on one published
run (`CALIBRATED_IN_8_BIT`, of the model with the largest part of matmuls). The remaining runs are evidence. On B200,
GB200 and GB300 there is no run in 16 bit, so the constant also has the error of the H100's share.

Nothing else changes: weights, master copy, gradients, optimizer state, activations and messages keep their bytes;
attention, the head and the rest are computed in 16 bit.
"""

from __future__ import annotations

from dataclasses import replace

from lib.planner.stacks import Stack

CALIBRATED_IN_8_BIT = {  # rows of `book/published/fp8.json`, predicted exactly
    "h100": "FP8 H100 Llama 3 405B (26.02)",
    "b200": "FP8 B200 Llama 3 8B",
    "gb200": "FP8 GB200 Llama 3 405B",
    "gb300": "FP8 GB300 Llama 3 405B",
}
SPEEDUPS = {"h100": 1.6074, "b200": 1.598, "gb200": 1.5864, "gb300": 1.9849}
WITHOUT_FP8 = {"v100", "a100", "a100-40gb", "a6000"}  # tensor cores of Volta and Ampere: NVIDIA's data sheets


def in_8_bit(stack: Stack, gpu: str) -> Stack:
    """A stack with the matmuls of its blocks in FP8; a GPU without calibration gets the constant of the H100.

    Raises:
        ValueError: a GPU that has no FP8.
    """
    if gpu in WITHOUT_FP8:
        raise ValueError(f"the {gpu} has no FP8: leave it out, or choose a GPU that has it, such as h100")
    return replace(stack, fp8_speedup=SPEEDUPS.get(gpu, SPEEDUPS["h100"]))


def in_8_bit_text(stack: Stack) -> str:
    """What a run in FP8 computes and keeps, in a sentence."""
    gpu = next((gpu for gpu, speedup in SPEEDUPS.items() if speedup == stack.fp8_speedup), None)
    by = f", calibrated on {CALIBRATED_IN_8_BIT[gpu]}" if gpu else ""
    return (
        f"FP8: the matmuls of the blocks are {stack.fp8_speedup:.2f} times as fast as in 16 bit{by}; weights, master "
        "copy, gradients, activations and messages keep their bytes; MFU is of the peak in 16 bit"
    )
