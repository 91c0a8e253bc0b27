"""The serial twin is the witness of every parallel layer, so its own numbers are checked against code not its own."""

import dataclasses
import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm

from lib.model import GPT, GPTConfig, loss_sum_and_count, loss_term, mean_loss, rotary

CONFIGS = [
    GPTConfig(),
    GPTConfig(tied=False),
    GPTConfig(vocab_size=11, context=7, d_model=12, num_layers=3, num_heads=3, tied=False),
    GPTConfig(vocab_size=50, context=9, d_model=24, num_layers=1, num_heads=6, num_kv_heads=2),
    GPTConfig(vocab_size=50, context=9, d_model=24, num_layers=2, num_heads=6, num_kv_heads=2, llama=True, d_mlp=20),
    GPTConfig(vocab_size=11, context=7, d_model=12, num_layers=1, num_heads=3, llama=True, tied=True),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def make(config: GPTConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config).to(dtype)


def tokens_of(config: GPTConfig, batch: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", CONFIGS)
def test_num_parameters_is_the_sum_over_the_parameters(config):
    model = GPT(config)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    assert config.num_block_parameters == sum(p.numel() for p in model.blocks[0].parameters())


def test_a_gpt2_block_has_12_d_squared_plus_13_d_parameters():
    assert GPTConfig(d_model=768, num_heads=12).num_block_parameters == 12 * 768**2 + 13 * 768
    gpt2 = GPTConfig(vocab_size=50257, context=1024, d_model=768, num_layers=12, num_heads=12)
    assert gpt2.num_parameters == 124_439_808  # GPT-2 small


def rotation(position: int, width: int) -> torch.Tensor:
    """RoPE as the paper has it: a matrix of 2 by 2 rotations on the diagonal. Su et al. 2021, equation 15."""
    angles = [position * 10_000 ** (-2 * (i // 2) / width) for i in range(0, width, 2)]
    turns = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
    return torch.block_diag(*torch.tensor(turns, dtype=torch.float64))


def normed(x: torch.Tensor, w: dict, name: str) -> torch.Tensor:
    if f"{name}.bias" in w:
        return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]


def multiplied(x: torch.Tensor, w: dict, name: str) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def by_hand(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """The model in loops over heads and positions, from the formula, with none of the model's own forward."""
    config = model.config
    w = dict(model.named_parameters(remove_duplicate=False))
    length, d_head, group = tokens.shape[1], config.d_head, config.num_heads // config.kv_heads
    at = [rotation(t, d_head) if config.llama else torch.eye(d_head).double() for t in range(length)]
    x = w["embed.token.weight"][tokens]
    x = x if config.llama else x + w["embed.position.weight"][:length]
    for i in range(config.num_layers):
        block = {name.removeprefix(f"blocks.{i}."): p for name, p in w.items() if name.startswith(f"blocks.{i}.")}
        qkv = multiplied(normed(x, block, "norm1"), block, "attention.qkv")
        keys_at = config.d_model
        values_at = keys_at + config.kv_heads * d_head
        heads = []
        for head in range(config.num_heads):
            q = qkv[..., head * d_head : (head + 1) * d_head]
            k = qkv[..., keys_at + head // group * d_head :][..., :d_head]
            v = qkv[..., values_at + head // group * d_head :][..., :d_head]
            q, k = (torch.stack([rows[:, t] @ at[t].T for t in range(length)], dim=1) for rows in (q, k))
            rows = []
            for t in range(length):
                scores = (k[:, : t + 1] @ q[:, t, :, None]).squeeze(-1) / math.sqrt(d_head)
                rows.append((scores.softmax(-1)[..., None] * v[:, : t + 1]).sum(1))
            heads.append(torch.stack(rows, dim=1))
        x = x + multiplied(torch.cat(heads, -1), block, "attention.out")
        h = multiplied(normed(x, block, "norm2"), block, "mlp.up")
        if config.llama:
            gate, up = h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]
            h = gate / (1 + torch.exp(-gate)) * up
        else:
            h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x = x + multiplied(h, block, "mlp.down")
    return normed(x, w, "head.norm") @ w["head.linear.weight"].T


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_equals_the_formula_written_out(config):
    model = make(config)
    for p in model.parameters():  # away from the start, where biases are 0 and norms 1
        p.data += 0.1 * torch.randn_like(p)
    tokens = tokens_of(config)[:, : min(9, config.context)]
    torch.testing.assert_close(model(tokens), by_hand(model, tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("llama", [False, True])
def test_dtype_is_that_of_the_parameters(dtype, llama):
    model = make(GPTConfig(llama=llama), dtype)
    logits = model(tokens_of(model.config))
    assert logits.dtype == dtype and logits.shape == (3, 64, 256)


def test_a_llama_of_published_sizes():
    """Llama 2 7B, and Llama 3 8B with its grouped heads, by their model cards."""
    seven = GPTConfig(32_000, 4096, 4096, 32, 32, llama=True, d_mlp=11_008)
    eight = GPTConfig(128_256, 8192, 4096, 32, 32, llama=True, d_mlp=14_336, num_kv_heads=8)
    assert seven.num_parameters == 6_738_415_616 and eight.num_parameters == 8_030_261_248


def test_the_family_decides_whether_the_head_is_tied():
    assert [GPTConfig(llama=llama).tied for llama in (False, True)] == [True, False]
    assert [GPTConfig(llama=llama, tied=not llama).tied for llama in (False, True)] == [True, False]
    assert [GPTConfig(llama=llama, tied=llama).tied for llama in (False, True)] == [False, True]
    assert dataclasses.replace(GPTConfig(), d_model=128).mlp_width == 512


def test_attention_of_turned_queries_and_keys_sees_distances():
    """A query at s and a key at t: the same product wherever they are, at one distance; and another at another one."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8).double()

    def product(s, t):
        return (rotary(q, torch.tensor([s])) * rotary(k, torch.tensor([t]))).sum().item()

    assert product(9, 4) == pytest.approx(product(5, 0), rel=1e-12) == pytest.approx(product(1005, 1000), rel=1e-12)
    assert abs(product(5, 0) - product(0, 5)) > 0.01 and abs(product(5, 0) - product(6, 0)) > 0.01
    x = torch.randn(2, 6, 3, 8).double()
    whole, positions = rotary(x, torch.arange(6)), torch.arange(6)
    parts = [rotary(part, where) for part, where in zip(x.split(2, 1), positions.split(2), strict=True)]
    assert torch.equal(torch.cat(parts, 1), whole), "a slice, with its positions, is the slice of the whole"
    assert rotary(x.bfloat16(), positions).dtype == torch.bfloat16
    torch.testing.assert_close(rotary(x.bfloat16(), positions).double(), whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("llama", [False, True])
def test_a_token_cannot_see_those_after_it(llama):
    model = make(GPTConfig(llama=llama))
    tokens = tokens_of(model.config)
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert (before[:, 40:] != after[:, 40:]).any(-1).all()


def test_the_model_is_a_list_that_stages_can_slice():
    model = make(GPTConfig(num_layers=4))
    tokens = tokens_of(model.config)
    first = nn.Sequential(model.embed, *model.blocks[:2])
    second = nn.Sequential(*model.blocks[2:], model.head)
    assert torch.equal(second(first(tokens)), model(tokens))


def test_same_seed_same_model_and_gpt2_initialisation():
    config = GPTConfig(d_model=128, num_layers=4, num_heads=4, tied=False)
    one, same, other = make(config, seed=3), make(config, seed=3), make(config, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.embed.token.weight, other.embed.token.weight)
    for name, p in one.named_parameters():
        if p.dim() == 2:
            residual = name.endswith(("out.weight", "down.weight"))
            assert p.std().item() == pytest.approx(0.02 / math.sqrt(8) if residual else 0.02, rel=0.05), name
        else:
            assert torch.equal(p, torch.full_like(p, float("norm" in name and name.endswith("weight")))), name
    loss = mean_loss(one(tokens_of(config)), tokens_of(config, seed=9))
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)  # knows nothing yet


def test_tied_is_one_parameter_with_two_uses():
    tied, untied = make(GPTConfig()), make(GPTConfig(tied=False))
    assert tied.head.linear.weight is tied.embed.token.weight
    assert deepcopy(tied).head.linear.weight.shape == (256, 64)
    assert (copy := deepcopy(tied)).head.linear.weight is copy.embed.token.weight
    assert set(tied.state_dict()) == set(untied.state_dict())
    untied.load_state_dict(tied.state_dict())
    tokens, targets = tokens_of(tied.config), tokens_of(tied.config, seed=2)
    for model in (tied, untied):
        mean_loss(model(tokens), targets).backward()
    both = untied.embed.token.weight.grad + untied.head.linear.weight.grad
    torch.testing.assert_close(tied.embed.token.weight.grad, both, rtol=1e-12, atol=1e-15)


def test_dropout_acts_in_training_only():
    model = make(GPTConfig(dropout=0.5))
    tokens = tokens_of(model.config)
    model.eval()
    assert torch.equal(model(tokens), make(GPTConfig())(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    for part in (model.embed, model.blocks[0].mlp, model.blocks[0].attention):
        x = torch.ones(2, 4, 64, dtype=torch.float64) if part is not model.embed else tokens
        assert (part(x) == 0).double().mean().item() == pytest.approx(0.5, abs=0.12)


def test_dropout_acts_on_the_attention_weights_too():
    attention = make(GPTConfig(dropout=0.5)).blocks[0].attention
    nn.init.zeros_(attention.qkv.weight)
    nn.init.ones_(attention.qkv.bias)  # all values are 1, so any mean of them is 1
    nn.init.eye_(attention.out.weight)
    y = attention(torch.zeros(1, 16, 64, dtype=torch.float64))
    assert y[y != 0].unique().numel() > 2  # with dropout of the output alone: only 2
    assert (attention.eval()(torch.zeros(1, 16, 64, dtype=torch.float64)) - 1).abs().max() < 1e-12


def test_it_learns():
    model = make(GPTConfig(vocab_size=16, context=16, d_model=32, num_layers=1), torch.float32)
    tokens = torch.arange(17).remainder(5).expand(8, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_counts_add_up_where_means_do_not(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 11, generator=generator, dtype=dtype)
    targets = torch.randint(11, (4, 6), generator=generator)
    targets[0, 2:] = -100
    targets[2] = -100
    whole = cross_entropy(logits.flatten(0, 1), targets.flatten())
    parts = [loss_sum_and_count(logits[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 3), slice(3, 4))]
    assert [count.item() for _, count in parts] == [2, 6, 6]
    total, count = (sum(column) for column in zip(*parts, strict=True))
    torch.testing.assert_close(total / count, whole)
    torch.testing.assert_close(mean_loss(logits, targets), whole)
    mean_of_means = torch.stack([total / count for total, count in parts]).mean()
    assert abs(mean_of_means - whole) > 1e-3


def test_any_index_can_be_the_ignored_one():
    logits, targets = torch.randn(1, 4, 5), torch.tensor([[1, 3, 3, 0]])
    total, count = loss_sum_and_count(logits, targets, ignore_index=3)
    kept = cross_entropy(logits[0, [0, 3]], targets[0, [0, 3]], reduction="sum")
    assert count == 2 and torch.allclose(total, kept)


def test_nothing_counted_is_zero_with_zero_gradients():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = mean_loss(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0 and torch.equal(logits.grad, torch.zeros(2, 3, 5))


def test_the_count_of_a_term_may_be_a_sum_of_weights():
    logits, targets = torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long)
    for count in (0.5, 2.5, 4, torch.tensor(0.25)):
        assert loss_term(logits, targets, count).item() == pytest.approx(math.log(2) / float(count))
    assert loss_term(logits, targets - 100, 0).item() == 0


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(8, 64, 256).bfloat16()
    total, _ = loss_sum_and_count(logits, torch.randint(256, (8, 64)))
    assert total.dtype == torch.float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_model": 10}, "d_model=10 cannot be split over num_heads=4; use a multiple of 4, such as 12"),
        ({"num_heads": 6, "d_model": 12, "num_kv_heads": 4}, "num_heads=6 cannot be split over num_kv_heads=4"),
        ({"num_layers": 0}, "num_layers=0 is not a positive integer"),
        ({"context": -1}, "context=-1 is not a positive integer"),
        ({"vocab_size": 2.5}, "vocab_size=2.5 is not a positive integer"),
        ({"num_heads": True}, "num_heads=True is not a positive integer"),
        ({"num_kv_heads": 0}, "kv_heads=0 is not a positive integer"),
        ({"d_mlp": 0}, "mlp_width=0 is not a positive integer"),
        ({"llama": True, "d_model": 12}, "d_head=3: RoPE turns pairs; use d_model=16"),
        ({"dropout": 1.0}, "dropout=1.0 is not a probability"),
        ({"dropout": -0.1}, "dropout=-0.1 is not a probability"),
        ({"vocab_size": 16, "document_end": 16}, "document_end=16 is no token: use 0 to 15"),
    ],
)
def test_wrong_sizes_say_the_numbers_and_the_way_out(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**wrong)


def test_wrong_inputs_say_the_numbers_and_the_way_out():
    model = GPT(GPTConfig())
    with pytest.raises(ValueError, match=r"65 tokens do not fit context=64; use fewer, or context=65"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \(5,\); the model takes \[B, T\]"):
        model(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(2, 3, 5\) and targets \(2, 4\)"):
        loss_sum_and_count(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
