"""What a step of the engine holds besides weights and state, from a configuration alone. No torch.

The tensors that are alive at once where a layer holds most, in the lifetimes that the models'
forward methods give them on the native kernels of the CPU. What PyTorch's forms of the operations
hold more of where there are no such kernels (of a prefill on CUDA, of gradients) is not counted.
"""

from __future__ import annotations

from yocolm.config import LlamaConfig, RetentionConfig, YocoConfig

_INTEGERS = 4 * 8  # bytes a token: its id, position, sequence, and its place in the pages
_KERNELS = 1 << 20  # bytes that kernels keep for themselves, a thread, as measured
_WIDE = 4  # bytes of what stays float32: tables of rotary angles, decays


def activation_bytes(
    config: YocoConfig | LlamaConfig,
    tokens: int,
    *,
    rows: int = 1,
    sequences: int = 1,
    dtype_bytes: int = 2,
    threads: int = 0,
) -> int:
    """Peak bytes of a step's activations.

    Args:
        tokens: of the step, through the first half; ``rows`` of them go through the second.
        sequences: that have tokens in the step.
        dtype_bytes: of a weight.
        threads: of the CPU, each with some memory of its own.
    """
    if isinstance(config, YocoConfig):
        parts = _yoco(config, tokens, sequences, dtype_bytes)
        head_dim = config.cross.head_dim
    else:
        parts = _llama(config, tokens, dtype_bytes)
        head_dim = config.head_dim
    # Of the rows: hidden states of both halves' layers, and logits with their float32 copy.
    size = config.hidden_size
    read = rows * (7 * size + config.intermediate_size) * dtype_bytes
    logits = rows * config.vocab_size * (dtype_bytes + _WIDE)
    tables = tokens * (head_dim * _WIDE + _INTEGERS)
    return threads * _KERNELS + tables + max(parts, tokens * size * dtype_bytes + read, logits)


def _yoco(config: YocoConfig, tokens: int, sequences: int, dtype_bytes: int) -> int:
    """Embeddings, the layer's input and its norm stay until the layer ends."""
    size, mixer = config.hidden_size, config.mixer
    mlp = 6 * size + config.intermediate_size  # and mixed, sum, norm, gated, output
    if isinstance(mixer, RetentionConfig):
        # Queries, keys, values and gates; both rotated; retained, gated, and the output.
        mixing, state = 12 * size, mixer.num_heads * mixer.head_dim**2 * _WIDE
        wide = tokens * mixer.num_heads * (dtype_bytes + 3 * _WIDE)
        staged = config.num_self_layers * sequences * state
        return max(tokens * mixing * dtype_bytes + wide, tokens * mlp * dtype_bytes) + staged
    kv = 2 * mixer.num_kv_heads * mixer.head_dim
    # Keys and values of all layers are in the step's hands until it is committed.
    staged = tokens * config.num_self_layers * kv * dtype_bytes
    queries = mixer.num_heads * mixer.head_dim
    mixing = 3 * size + 2 * queries + kv + max(size, queries)
    return tokens * max(mixing, mlp) * dtype_bytes + staged


def _llama(config: LlamaConfig, tokens: int, dtype_bytes: int) -> int:
    """The layer's input and its norm stay; of a layer that has ended only its output does."""
    size, queries = config.hidden_size, config.num_heads * config.head_dim
    # Queries as projected, attended, and either rotated ones before or the output behind.
    mixing = 2 * size + 2 * queries + max(size, queries)
    mlp = 5 * size + config.intermediate_size
    return tokens * max(mixing, mlp) * dtype_bytes
