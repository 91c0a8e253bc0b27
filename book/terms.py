"""A printed formula, and the function that must give the same number.

The problem: a number on a poster is copied for years, and nobody computes it again. The idea: a formula is text in the
letters of `book/formulas.md`, and text can be evaluated. `Term.said` computes it and asks the library, and refuses to
print a formula that the library contradicts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lib import cost
from lib.cost.bubble import kept_by
from lib.cost.experts import ExpertShape, dispatch_bytes
from lib.cost.sizes import LLAMA, MODELS, RECIPES, ModelShape

Letters = Mapping[str, float]  # letter of a formula → its value

MODEL_7B = MODELS["7B"]
_SHARED = {"Ψ": MODEL_7B.num_parameters, "l": MODEL_7B.num_layers, "h": MODEL_7B.d_model, "f": MODEL_7B.mlp_width}
_SHARED |= {"b": 1, "s": MODEL_7B.context}
SEQUENCES = 32  # of a step
# Ranks that divide the batch have fewer microbatches each than ranks that divide the model.
ON_DATA = {**_SHARED, "d": 8, "m": SEQUENCES // 8, "E": 8, "k": 2, "e": 8}
ON_MODEL = {**_SHARED, "t": 8, "c": 8, "p": 8, "v": 4, "m": SEQUENCES}


@dataclass(frozen=True)
class Term:
    """A quantity: words, a formula, and what `lib.cost` says of it.

    Args:
        words: before the formula.
        formula: as it is printed. A letter is a variable, and what stands side by side is multiplied.
        by: letters → the same, by `lib.cost`: bytes; for `unit` "%" a fraction, for "" a number.
        example: the letters of the printed number.
    """

    words: str
    formula: str
    by: Callable[[Letters], float]
    example: Letters
    unit: str = "GB"

    def said(self) -> str:
        """The formula and its number.

        Raises:
            ValueError: the formula and `lib.cost` give different numbers.
        """
        computed = self.by(self.example)
        if not math.isclose(value(self.formula, self.example), computed, rel_tol=1e-12):
            raise ValueError(
                f"{self.words}: {self.formula} is {value(self.formula, self.example)}, and lib.cost says {computed}"
            )
        return f"{self.formula} = {amount(computed, self.unit)}"


def amount(x: float, unit: str) -> str:
    """Three digits: 23.6 GB, 108 GB, 17.9 %."""
    scaled = x * {"GB": 1e-9, "%": 100, "": 1, "×": 1}[unit]
    return f"{scaled:.{max(0, 2 - math.floor(math.log10(scaled)))}f} {unit}" if unit else f"{scaled:g}"


def value(formula: str, letters: Letters) -> float:
    """The number that a printed formula stands for.

    Raises:
        ValueError: a letter without a value, or anything but letters, numbers, brackets and + − · / ².
    """
    written = re.sub(r"\s", "", formula).replace("²", "**2").replace("−", "-").replace("·", "*")
    code = re.sub(r"(?<=[\w)])(?=[^\W\d]|\()", "*", written)
    if strange := set(re.findall(r"[^\W\d]", code)) - letters.keys() or set(re.findall(r"[^\w()+*/.-]", code)):
        raise ValueError(f"{formula}: {', '.join(sorted(strange))} has no value here")
    return eval(code, {"__builtins__": {}}, dict(letters))


# ---- quantities, by lib.cost -----------------------------------------------------------------------------------------


def shape_of(letters: Letters) -> ModelShape:
    """A Llama with these sizes. Its vocabulary and heads are in no formula of the sheet."""
    sizes = {"vocab_size": MODEL_7B.vocab_size, "context": letters["s"], "d_mlp": letters["f"], "tied": False}
    return ModelShape(letters["h"], letters["l"], MODEL_7B.num_heads, **sizes, **LLAMA)


def states(letters: Letters, zero: int = 0, **ranks: int) -> float:
    """Bytes of weights, gradients and optimizer states."""
    return sum(cost.state_bytes(letters["Ψ"], RECIPES["mixed Adam"], zero=zero, **ranks).values())


def activations(letters: Letters, **how: object) -> float:
    """Of one microbatch in all layers."""
    one = cost.activation_bytes(shape_of(letters), letters["b"], fused_attention=True, **how)
    return letters["l"] * one


def block_flops(letters: Letters, recompute: str) -> float:
    """Of a step, without the head."""
    return cost.train_flops(replace(shape_of(letters), vocab_size=0), letters["b"], recompute)


def boundary_bytes(letters: Letters) -> float:
    """Bytes of an activation between two layers."""
    return 2 * letters["b"] * letters["s"] * letters["h"]


def zero_sends(stage: int) -> Callable[[Letters], float]:
    """Bytes of gradients and parameters in a step."""

    def sent(letters: Letters) -> float:
        microbatches = letters["m"] if stage >= 2 else 1
        return cost.zero_wire_bytes(stage, 2 * letters["Ψ"], letters["d"], microbatches=microbatches)

    return sent


def tensor_sends(sequence_parallel: bool) -> Callable[[Letters], float]:
    """Bytes of activations in the blocks of a step."""

    def sent(letters: Letters) -> float:
        of_block = cost.block_wire_bytes(boundary_bytes(letters), letters["t"], sequence_parallel=sequence_parallel)
        return letters["l"] * letters["m"] * of_block

    return sent


def context_sends(letters: Letters) -> float:
    """Bytes of keys and values in the blocks of a step, where each query has its own: once forward, twice backward."""
    once = cost.wire_bytes("all_gather", 2 * boundary_bytes(letters), letters["c"])
    return 3 * letters["l"] * letters["m"] * once


def expert_shape_of(letters: Letters) -> ExpertShape:
    """The Llama, with E experts in each block, as wide as its MLP."""
    return ExpertShape(shape_of(letters), letters["E"], letters["k"], letters["f"])


def expert_sends(letters: Letters) -> float:
    """Bytes of copies of tokens in the blocks of a step."""
    of_block = dispatch_bytes(expert_shape_of(letters), letters["b"] * letters["s"], letters["e"])
    return letters["l"] * letters["m"] * of_block


def pipeline_sends(stages: Callable[[Letters], float]) -> Callable[[Letters], float]:
    """A rank in the middle passes an activation on for each stage and microbatch, and a gradient back."""
    return lambda e: 2 * stages(e) * e["m"] * cost.wire_bytes("send", boundary_bytes(e), 2)


def split_bubble(wait_s: Callable[[int], float]) -> Callable[[Letters], float]:
    """The bubble of a step whose forward and both halves of backward take a second each."""
    return lambda e: wait_s(e["p"]) / (3 * e["m"] + wait_s(e["p"]))


def as_1f1b(letters: Letters) -> float:
    """Microbatches that rank 0 keeps."""
    return kept_by(0, letters["p"], letters["m"])


def kept(microbatches: Callable[[Letters], float]) -> Callable[[Letters], float]:
    """Bytes of so many microbatches, in the layers of a rank."""
    return lambda e: microbatches(e) / e["p"] * activations(e)
