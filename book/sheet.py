"""The sheet to pin up: what it says around the techniques of `book.axes`, for one model on eight ranks.

`book_sheet.py` lays both out.
"""

from __future__ import annotations

from book.terms import MODEL_7B, ON_DATA, ON_MODEL, SEQUENCES, Term
from lib.cost.bubble import microbatches_for

EXAMPLE = (
    f"In numbers: Llama 2 7B (Ψ = {MODEL_7B.num_parameters / 1e9:.3g} billion, l = {MODEL_7B.num_layers}, "
    f"h = {MODEL_7B.d_model:,}, f = {MODEL_7B.mlp_width:,}), trained in mixed precision with Adam, on 8 ranks; a step "
    f"has {SEQUENCES} sequences of s = {MODEL_7B.context:,} tokens, one per microbatch (b = 1): m = {ON_DATA['m']} on "
    f"each rank that divides the batch, m = {ON_MODEL['m']} on ranks that divide the model."
)
LETTERS = (
    "Ψ parameters · d, t, p data-, tensor- and pipeline-parallel ranks · m microbatches per step · b sequences of s "
    "tokens in each · l layers of width h · f width of the MLP · v stages per rank. 2 bytes per element sent; of a "
    "parameter's 16 bytes 2 are the weight, 2 its gradient, 12 the optimizer's. A fused kernel keeps no matrix of "
    "attention. Bytes are those that one rank sends. GB = 10⁹ bytes."
)
# A bubble of a fifth: (p−1)/(m+p−1) = 1/5.
ENOUGH = Term("A bubble of 20 % needs", "4(p−1)", lambda e: microbatches_for(e["p"], 0.2), ON_MODEL, "")
TOGETHER = (
    "Together: t·p·d ranks. Tensor (with sequence) parallelism inside a node, pipeline stages across nodes, the batch "
    "over all that is left, with ZeRO-1 (chapter 13). Cut as little as fits, and let python -m lib.planner compare the "
    "layouts: the rule “t as large as a node” is often slower (chapter 14). Very long sequences need context "
    "parallelism too, which is not on this sheet (chapter 7)."
)
SPLIT_NOTE = "ZB-H1 and ZB-V: with forward, input and weight gradients of equal length."
