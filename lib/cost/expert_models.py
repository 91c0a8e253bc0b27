"""Sizes of models with experts, by the names that people use.

Facts, from the configurations that their authors publish with the weights (`config.json` of each model on Hugging Face,
read for their sizes): mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1, Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B,
openai/gpt-oss-20b and gpt-oss-120b, deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Base. `tests/book/expert_counts.json`
has the parameters that transformers counts. `context` is 4,096 tokens, chosen: the sequence of the published runs in
`book/published/experts.json`. The block that predicts further tokens in DeepSeek-V3 is not counted.
"""

from lib.cost.experts import ExpertShape, LatentAttention
from lib.cost.sizes import LLAMA, ModelShape


def _base(d_model: int, layers: int, heads: int, vocab: int, kv_heads: int, d_mlp: int, head_dim: int, **more: str):
    sizes = {"num_kv_heads": kv_heads, "d_mlp": d_mlp, "head_dim": head_dim, "tied": False}
    return ModelShape(d_model, layers, heads, vocab, 4096, **sizes | LLAMA | more)


_LATENT = LatentAttention(1536, 512, 64, 128, 128)
EXPERT_MODELS: dict[str, ExpertShape] = {
    "mixtral-8x7b": ExpertShape(_base(4096, 32, 32, 32_000, 8, 14_336, 128), 8, 2, 14_336),
    "mixtral-8x22b": ExpertShape(_base(6144, 56, 48, 32_768, 8, 16_384, 128), 8, 2, 16_384),
    "qwen3-30b-a3b": ExpertShape(_base(2048, 48, 32, 151_936, 4, 6144, 128), 128, 8, 768),
    "qwen3-235b-a22b": ExpertShape(_base(4096, 94, 64, 151_936, 4, 12_288, 128), 128, 8, 1536),
    "gpt-oss-20b": ExpertShape(_base(2880, 24, 64, 201_088, 8, 2880, 64, biases="all"), 32, 4, 2880),
    "gpt-oss-120b": ExpertShape(_base(2880, 36, 64, 201_088, 8, 2880, 64, biases="all"), 128, 4, 2880),
    "deepseek-v3": ExpertShape(
        _base(7168, 61, 128, 129_280, 128, 18_432, 192),
        256,
        8,
        2048,
        d_shared=2048,
        dense=(0, 1, 2),
        latent=_LATENT,
    ),
    "kimi-k2": ExpertShape(
        _base(7168, 61, 64, 163_840, 64, 18_432, 192), 384, 8, 2048, d_shared=2048, dense=(0,), latent=_LATENT
    ),
}
