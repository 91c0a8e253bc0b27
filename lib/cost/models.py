"""Sizes of models of today, by the names that people use.

Facts, from the configurations that their authors publish with the weights (`config.json` of each model on Hugging Face,
read as sizes only), and `context` from their reports: tokens of a sequence in most of the pre-training (Llama 3 2024,
section 3.4; Qwen3 2025, section 3.2; Gemma 2 2024, table 1; Mistral 7B 2023, table 1; Radford et al. 2019, table 2).
Norms of queries and keys (Qwen3) and the two additional norms of a block of Gemma 2 are left out: 0.01 % of the
parameters. `tests/lib/test_cost.py` compares each number of parameters with the published one.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from lib.cost.sizes import LLAMA, MODELS, ModelShape

_GATED = {  # name: (h, l, a, V, s, heads of keys and values, f, width of a head unless h/a, tied)
    "llama3-8b": (4096, 32, 32, 128_256, 8192, 8, 14_336, None, False),
    "llama3-70b": (8192, 80, 64, 128_256, 8192, 8, 28_672, None, False),
    "llama3.2-1b": (2048, 16, 32, 128_256, 8192, 8, 8192, None, True),
    "llama3.2-3b": (3072, 28, 24, 128_256, 8192, 8, 8192, None, True),
    "qwen3-0.6b": (1024, 28, 16, 151_936, 4096, 8, 3072, 128, True),
    "qwen3-1.7b": (2048, 28, 16, 151_936, 4096, 8, 6144, None, True),
    "qwen3-4b": (2560, 36, 32, 151_936, 4096, 8, 9728, 128, True),
    "qwen3-8b": (4096, 36, 32, 151_936, 4096, 8, 12_288, None, False),
    "qwen3-14b": (5120, 40, 40, 151_936, 4096, 8, 17_408, None, False),
    "qwen3-32b": (5120, 64, 64, 151_936, 4096, 8, 25_600, 128, False),
    "gemma2-2b": (2304, 26, 8, 256_000, 8192, 4, 9216, 256, True),
    "gemma2-9b": (3584, 42, 16, 256_000, 8192, 8, 14_336, 256, True),
    "gemma2-27b": (4608, 46, 32, 256_000, 8192, 16, 36_864, 128, True),
    "mistral-7b": (4096, 32, 32, 32_000, 8192, 8, 14_336, None, False),
}
_GPT2 = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}

PRESETS: dict[str, ModelShape] = {
    "llama3-405b": MODELS["405B"],
    **{name: ModelShape(*sizes, tied=tied, **LLAMA) for name, (*sizes, tied) in _GATED.items()},
    **{name: ModelShape(*sizes, vocab_size=50_257, context=1024) for name, sizes in _GPT2.items()},
}


def model_text(shape: ModelShape) -> str:
    """All sizes of a model, in a sentence."""
    has = {"gated MLP": shape.gated, "RMSNorm": shape.rms_norm, "rotary positions": shape.rotary}
    has |= {"dropout": shape.dropout_masks, "tied head": shape.tied}
    heads = f"{shape.num_heads} heads of {shape.d_head} ({shape.num_kv_heads or shape.num_heads} of keys and values)"
    return (
        f"{shape.num_parameters / 1e9:.4g} billion parameters, {shape.num_layers} blocks of width {shape.d_model}, "
        f"{heads}, MLP {shape.mlp_width}, vocabulary {shape.vocab_size}, sequences of {shape.context} tokens, "
        f"biases {shape.biases}, {', '.join(name if on else f'no {name}' for name, on in has.items())}"
    )


# What the formulas do not have → names that would be read as if they had it.
_EXPERTS = r"moe|mixtral|\dx\d+b|-a\d+(\.\d)?b|deepseek-?(v\d|r1)(?!-distill)|dbrx|grok|gpt-oss|llama-?4\b|kimi-?k"
NOT_MODELLED = {"a mixture of experts": _EXPERTS, "keeping weights in FP8": "fp8", "FP4": r"fp4\b"}
NOT_IN_A_NAME = {"LoRA": "lora", "offload": "offload"}  # options of the planner


def same_name(name: str, among: Iterable[str]) -> str:
    """The one of these names that is meant, also with its publisher, and with other hyphens; or nothing."""
    plain = {one.replace("-", ""): one for one in among}
    return plain.get(str(name).lower().rpartition("/")[2].replace("-", ""), "")


def known(name: str, among: dict, what: str, otherwise: str = "") -> str:
    """Return the name if it exists, also with its publisher, and with other hyphens.

    Args:
        otherwise: what else to give.

    Raises:
        ValueError: it does not exist, or names something that is not modelled; the message has the names, or the
            nearest of many.
    """
    small = str(name).lower()
    for part, pattern in NOT_MODELLED.items():
        if re.search(pattern, small):
            raise ValueError(f"{name}: {part} is not modelled")
    for part, pattern in NOT_IN_A_NAME.items():
        if re.search(pattern, small):
            raise ValueError(f"{name}: {part} is no part of a name; it is an option of python -m lib.planner")
    if found := same_name(name, among):
        return found
    said = f"{what} {name!r} is not a preset"
    near = " or ".join(get_close_matches(small, among, n=3, cutoff=0.75))
    if len(among) < 9 or (len(among) < 20 and not near):
        raise ValueError(f"{said} ({', '.join(among)}){otherwise and f': {otherwise}'}")
    raise ValueError(f"{said}{otherwise and f': {otherwise}'}{near and f'; or did you mean {near}?'}")
