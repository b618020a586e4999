"""Makes `data/llama-tiny` and `data/llama-bias-tiny` with transformers' LlamaForCausalLM.

    python tests/golden/make_llama_golden.py

Seeded random weights with perturbed norms, and the outputs of transformers on the CPU in float32,
in the form that data/README.md describes. The tests read the files only and need no transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

DATA = Path(__file__).parent / "data"
GENERATED = 12

PLAIN = LlamaConfig(
    vocab_size=264,
    hidden_size=64,
    intermediate_size=144,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    rms_norm_eps=1e-5,
    eos_token_id=[2, 3],
)
# Everything that the plain one leaves out: biases, tied embeddings, heads wider than D / H.
BIASED = LlamaConfig(
    vocab_size=264,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=1,
    head_dim=12,
    max_position_embeddings=512,
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
)


def randomise(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Weights large enough that a wrong norm, bias or rotation shows in the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else parameter.shape[1] ** -0.5))
        head = model.lm_head.weight
        head.mul_(0.5 / head.std() * head.shape[1] ** -0.5)


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy ids [G] and the logits [G, V] behind them, without a cache."""
    ids, rows = prompt, []
    for _ in range(GENERATED):
        rows.append(model(ids[None]).logits[0, -1])
        ids = torch.cat((ids, rows[-1].argmax()[None]))
    return ids[len(prompt) :], torch.stack(rows)


@torch.no_grad()
def make(name: str, config: LlamaConfig, length: int, prompt_len: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    randomise(model, generator)
    token_ids = torch.randint(4, config.vocab_size, (length,), generator=generator)
    ids, logits = generate(model, token_ids[:prompt_len])
    model.save_pretrained(DATA / name)
    expected = {
        "token_ids": token_ids.int(),
        "logits": model(token_ids[None]).logits[0].contiguous(),
        "prompt_len": torch.tensor([prompt_len], dtype=torch.int32),
        "generated_ids": ids.int(),
        "generated_logits": logits,
    }
    save_file(expected, DATA / name / "expected.safetensors")
    print(name, "logits std", float(expected["logits"].std()))


if __name__ == "__main__":
    make("llama-tiny", PLAIN, length=330, prompt_len=310, seed=1)
    make("llama-bias-tiny", BIASED, length=160, prompt_len=70, seed=2)
