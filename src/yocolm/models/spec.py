"""What a model costs, from its configuration alone: the only memory and cost formulas there are.

The allocator, the scheduler, the simulator, `yocolm info` and the benchmarks all ask here. FLOPs
count a multiply and an add as two and matrix products only (projections, attention, retention);
norms, activations and rotations are left out. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from yocolm.config import (
    Gemma3nConfig,
    Gemma4Config,
    GemmaConfig,
    LlamaConfig,
    ModelConfig,
    RetentionConfig,
    YocoConfig,
)
from yocolm.models.parts import Block, altup, laurel, linear, mlp, norm, product

StoreKind = Literal["global_kv", "window_kv", "recurrent"]
STATE_BYTES = 4  # recurrent state is float32 even where the model is narrower
DEFAULT_PAGE_SIZE = 64
RETENTION_CHUNK = 128  # tokens a chunk of retention's chunkwise form, in the engine and in training


@dataclass(frozen=True)
class Store:
    """One piece of state. `num_heads` are KV heads, or retention heads if recurrent.

    `readers` is how many layers read it; `window` is 0 except for window_kv.
    """

    kind: StoreKind
    num_heads: int
    k_dim: int
    v_dim: int
    readers: int
    window: int = 0

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that every token of context adds: 0 unless this is a global KV."""
        if self.kind != "global_kv":
            return 0
        return self.num_heads * (self.k_dim + self.v_dim) * dtype_bytes

    def bytes_per_slot(self, dtype_bytes: int) -> int:
        """Constant bytes of one running sequence: 0 for a global KV."""
        if self.kind == "window_kv":
            return self.window * self.num_heads * (self.k_dim + self.v_dim) * dtype_bytes
        if self.kind == "recurrent":
            return self.num_heads * self.k_dim * self.v_dim * max(STATE_BYTES, dtype_bytes)
        return 0


@dataclass(frozen=True)
class Mixer:
    """One layer's token mixing, as far as its cost depends on the context."""

    kind: StoreKind
    num_heads: int
    k_dim: int
    v_dim: int
    window: int = 0

    def flops(self, context: int, chunk: int = 1) -> int:
        """FLOPs for one token that sees `context` tokens, itself included.

        `chunk` is retention's own: 1 is the recurrent form (the state is updated, then read); in
        the chunkwise form a token also meets the whole chunk, as the masked products are dense.
        """
        k, v = self.k_dim, self.v_dim
        if self.kind == "recurrent":
            within = 2 * chunk * (k + v) if chunk > 1 else 0
            return self.num_heads * (4 * k * v + within)
        keys = min(context, self.window) if self.window else context
        return self.num_heads * 2 * keys * (k + v)

    def span_flops(self, start: int, stop: int, chunk: int = 1) -> int:
        """FLOPs for the tokens at positions start..stop-1, in closed form."""
        if self.kind == "recurrent":
            return (stop - start) * self.flops(stop, chunk)
        per_key = self.num_heads * 2 * (self.k_dim + self.v_dim)
        return per_key * (visible_tokens(stop, self.window) - visible_tokens(start, self.window))


@dataclass(frozen=True)
class ModelSpec:
    """Stores, parameters and FLOPs of the two halves of a model.

    `write_params` and `read_params` count everything in a half (projections, norms, biases);
    `embed_params` the token embeddings; `table_params` a further table of inputs that is only
    looked up, a row for each token; `head_params` what `logits` reads, which for `tied` models are
    the embeddings themselves and count once in `num_params`. Layer i of the first half owns the
    i-th store.
    """

    stores: tuple[Store, ...]
    write_mixers: tuple[Mixer, ...]
    read_mixers: tuple[Mixer, ...]
    write_params: int
    read_params: int
    embed_params: int
    head_params: int
    tied: bool
    write_flops_per_token: int
    read_flops_per_row: int
    logits_flops_per_row: int
    table_params: int = 0
    vocab_size: int = 0

    @property
    def global_stores(self) -> tuple[Store, ...]:
        """In store order; so are the other two."""
        return self._of_kind("global_kv")

    @property
    def window_stores(self) -> tuple[Store, ...]:
        return self._of_kind("window_kv")

    @property
    def recurrent_stores(self) -> tuple[Store, ...]:
        return self._of_kind("recurrent")

    @property
    def num_params(self) -> int:
        head = 0 if self.tied else self.head_params
        return self.write_params + self.read_params + self.embed_params + self.table_params + head

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of all parameters at `dtype_bytes` each."""
        return self.num_params * dtype_bytes

    def page_bytes(self, page_size: int, dtype_bytes: int) -> int:
        """Bytes of one page: `page_size` tokens in every global KV."""
        return page_size * sum(store.bytes_per_token(dtype_bytes) for store in self.stores)

    def slot_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one sequence's constant-size state."""
        return sum(store.bytes_per_slot(dtype_bytes) for store in self.stores)

    def num_pages(self, num_tokens: int, page_size: int) -> int:
        """Pages that `num_tokens` tokens occupy; none if no store grows."""
        return math.ceil(num_tokens / page_size) if self.global_stores else 0

    def bytes(self, num_tokens: int, page_size: int, dtype_bytes: int) -> int:
        """Footprint of one running request: whole pages, and one slot."""
        pages = self.num_pages(num_tokens, page_size)
        return pages * self.page_bytes(page_size, dtype_bytes) + self.slot_bytes(dtype_bytes)

    def unshared_bytes(self, num_tokens: int, page_size: int, dtype_bytes: int) -> int:
        """What `bytes` were if every layer that reads a store had one of its own."""
        pages = self.num_pages(num_tokens, page_size)
        return sum(
            store.readers
            * (
                pages * page_size * store.bytes_per_token(dtype_bytes)
                + store.bytes_per_slot(dtype_bytes)
            )
            for store in self.stores
        )

    def scan_bytes(self, dtype_bytes: int) -> tuple[int, int]:
        """Bytes of global KV, for every token of context, that a decode reads in the first and in
        the second half: every reader layer reads all of its store."""
        own = self.stores[: len(self.write_mixers)]
        write = sum(store.bytes_per_token(dtype_bytes) for store in own)
        both = sum(store.readers * store.bytes_per_token(dtype_bytes) for store in self.stores)
        return write, both - write

    def window_scans(self, dtype_bytes: int) -> tuple[tuple[int, int, int], ...]:
        """For every length of window: it, and the bytes that a decode reads of every token in the
        windows of that length, in the first and in the second half."""
        scans: dict[int, list[int]] = {}
        for i, store in enumerate(self.stores):
            if store.kind == "window_kv":
                size = store.num_heads * (store.k_dim + store.v_dim) * dtype_bytes
                write, read = scans.setdefault(store.window, [0, 0])
                own = i < len(self.write_mixers)
                scans[store.window] = [write + own * size, read + (store.readers - own) * size]
        return tuple((window, write, read) for window, (write, read) in scans.items())

    def write_attention_flops(self, context: int, chunk: int = 1) -> int:
        """Token mixing of the first half for one token that sees `context` tokens."""
        return sum(mixer.flops(context, chunk) for mixer in self.write_mixers)

    def read_attention_flops(self, context: int) -> int:
        """Attention of the second half for one row that sees `context` tokens."""
        return sum(mixer.flops(context) for mixer in self.read_mixers)

    def write_flops(self, start: int, stop: int, chunk: int = RETENTION_CHUNK) -> int:
        """The whole first half for the tokens at positions start..stop-1, computed at once.

        Retention's chunks have `chunk` tokens, or all if there are fewer."""
        chunk = min(chunk, stop - start)
        mixing = sum(mixer.span_flops(start, stop, chunk) for mixer in self.write_mixers)
        return (stop - start) * self.write_flops_per_token + mixing

    def read_flops(self, contexts: Iterable[int]) -> int:
        """The whole second half and the logits for rows that see `contexts` tokens each."""
        per_row = self.read_flops_per_row + self.logits_flops_per_row
        return sum(per_row + self.read_attention_flops(context) for context in contexts)

    def skipped_share(self, num_tokens: int) -> float:
        """Share of a prompt's FLOPs that are saved where only its last row enters the second half,
        of what they were if all rows did (logits of the last one)."""
        whole = self._all_rows_flops(num_tokens) + self.logits_flops_per_row
        return 1 - self.prefill_flops(num_tokens) / whole

    def prefill_flops(self, num_tokens: int, chunk: int = RETENTION_CHUNK) -> int:
        """A prompt that needs only its last row."""
        return self.write_flops(0, num_tokens, chunk) + self.read_flops((num_tokens,))

    def decode_flops(self, context: int) -> int:
        """One token that sees `context` tokens, itself included, through both halves."""
        return self.write_flops(context - 1, context, chunk=1) + self.read_flops((context,))

    def train_flops(self, length: int, chunk: int = RETENTION_CHUNK) -> int:
        """One sequence of `length` tokens in training: every row through both halves and the
        logits, three times (forward, and twice as much backward). What gradient checkpointing
        computes again is not counted."""
        return 3 * (self._all_rows_flops(length, chunk) + length * self.logits_flops_per_row)

    def _all_rows_flops(self, num_tokens: int, chunk: int = RETENTION_CHUNK) -> int:
        """Both halves for every token of a sequence, without logits."""
        mixing = sum(mixer.span_flops(0, num_tokens) for mixer in self.read_mixers)
        return (
            self.write_flops(0, num_tokens, chunk) + num_tokens * self.read_flops_per_row + mixing
        )

    def _of_kind(self, kind: StoreKind) -> tuple[Store, ...]:
        return tuple(store for store in self.stores if store.kind == kind)


def model_spec(config: ModelConfig) -> ModelSpec:
    """The costs of a configuration. Stores of a kind are numbered in layer order."""
    if isinstance(config, YocoConfig):
        return _yoco_spec(config)
    if isinstance(config, LlamaConfig):
        return _llama_spec(config)
    return _gemma_spec(config)


def _spec(
    config: ModelConfig,
    stores: tuple[Store, ...],
    mixers: tuple[tuple[Mixer, ...], tuple[Mixer, ...]],
    blocks: tuple[Block, Block],
    table_params: int = 0,
) -> ModelSpec:
    vocabulary = config.vocab_size * config.hidden_size
    write, read = blocks
    return ModelSpec(
        stores=stores,
        write_mixers=mixers[0],
        read_mixers=mixers[1],
        write_params=write.params,
        read_params=read.params,
        embed_params=vocabulary,
        head_params=vocabulary,
        tied=config.tie_word_embeddings,
        write_flops_per_token=write.flops,
        read_flops_per_row=read.flops,
        logits_flops_per_row=2 * vocabulary,
        table_params=table_params,
        vocab_size=config.vocab_size,
    )


def _yoco_spec(config: YocoConfig) -> ModelSpec:
    size, mixer, cross = config.hidden_size, config.mixer, config.cross
    dim = mixer.head_dim
    if isinstance(mixer, RetentionConfig):
        store = Store("recurrent", mixer.num_heads, dim, dim, readers=1)
        self_mixer = Mixer("recurrent", mixer.num_heads, dim, dim)
        attention = linear(size, 4 * size) + linear(size, mixer.num_heads)
    else:
        store = Store("window_kv", mixer.num_kv_heads, dim, dim, readers=1, window=mixer.window)
        self_mixer = Mixer("window_kv", mixer.num_heads, dim, dim, mixer.window)
        heads = mixer.num_heads + 2 * mixer.num_kv_heads
        attention = linear(size, heads * dim, mixer.qkv_bias)
    feed_forward = mlp(size, config.intermediate_size)
    self_layer = norm(size) + attention + linear(size, size) + feed_forward
    kv = norm(size) + linear(size, 2 * cross.num_kv_heads * cross.head_dim, cross.qkv_bias)
    query = linear(size, size, cross.qkv_bias) + norm(cross.head_dim if cross.qk_norm else 0)
    cross_layer = norm(size) + query + linear(size, size) + feed_forward

    num_self, num_cross = config.num_self_layers, config.num_cross_layers
    shared = Store("global_kv", cross.num_kv_heads, cross.head_dim, cross.head_dim, num_cross)
    reader = Mixer("global_kv", cross.num_heads, cross.head_dim, cross.head_dim)
    return _spec(
        config,
        stores=(store,) * num_self + (shared,),
        mixers=((self_mixer,) * num_self, (reader,) * num_cross),
        blocks=(self_layer * num_self + kv, cross_layer * num_cross + norm(size)),
    )


def _llama_spec(config: LlamaConfig) -> ModelSpec:
    size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
    store = Store("global_kv", config.num_kv_heads, dim, dim, readers=1)
    mixer = Mixer("global_kv", config.num_heads, dim, dim)
    kv = norm(size) + linear(size, 2 * config.num_kv_heads * dim, bias)
    rest = (
        linear(size, config.num_heads * dim, bias)
        + linear(config.num_heads * dim, size, bias)
        + mlp(size, config.intermediate_size, config.mlp_bias)
    )
    # Rows are selected at the last write: of the last layer only its K and V are for every token.
    # Its attention norm is computed in both halves but exists once, in the first.
    full = config.num_layers - 1
    return _spec(
        config,
        stores=(store,) * config.num_layers,
        mixers=((mixer,) * full, (mixer,)),
        blocks=((kv + rest) * full + kv, rest + norm(size)),
    )


def _gemma_spec(config: Gemma3nConfig | Gemma4Config) -> ModelSpec:
    size, layers, last = config.hidden_size, config.num_layers, config.num_writers - 1
    heads = [config.attention(layer) for layer in range(layers)]
    stores = tuple(
        Store(
            "window_kv" if own.window else "global_kv",
            own.num_kv_heads,
            own.head_dim,
            own.head_dim,
            config.num_readers(layer),
            own.window,
        )
        for layer, own in enumerate(heads[: last + 1])
    )
    mixers = tuple(
        Mixer(
            "window_kv" if own.window else "global_kv",
            own.num_heads,
            own.head_dim,
            own.head_dim,
            own.window,
        )
        for own in heads
    )
    # Rows are selected at the last write: of that layer only its K and V are for every token.
    inputs = linear(size, config.per_layer_size)  # for one layer
    write = _gemma_kv(config, last) + norm(config.per_layer_size)
    for layer in range(last):
        write = write + _gemma_kv(config, layer) + _gemma_rest(config, layer) + inputs
    read = norm(size * (layers - last))  # attention norms of the readers, and the final one
    for layer in range(last, layers):
        read = read + _gemma_rest(config, layer) + inputs
    if isinstance(config, Gemma3nConfig):
        streams = config.altup_num_inputs
        to_streams = linear(size, (streams - 1) * size)
        # What keys need of the last layer's prediction; all of it is in the second half.
        routed = size * streams + streams**3
        write, read = write + to_streams + product(routed), read + to_streams
    table = config.per_layer_vocab_size * layers * config.per_layer_size
    return _spec(config, stores, (mixers[:last], mixers[last:]), (write, read), table)


def _gemma_kv(config: GemmaConfig, layer: int) -> Block:
    """Attention norm, keys and values with their norm."""
    heads, size = config.attention(layer), config.hidden_size
    width = heads.num_kv_heads * heads.head_dim * (1 if heads.k_is_v else 2)
    return norm(size) + linear(size, width, config.attention_bias) + norm(heads.head_dim)


def _gemma_rest(config: GemmaConfig, layer: int) -> Block:
    """A layer without `_gemma_kv` and, of the readers, without the attention norm."""
    heads, size, inputs = config.attention(layer), config.hidden_size, config.per_layer_size
    width, bias = heads.num_heads * heads.head_dim, config.attention_bias
    block = linear(size, width, bias) + norm(heads.head_dim) + linear(width, size, bias)
    block = block + norm(size) + mlp(size, config.mlp_width(layer)) + norm(size)
    if inputs:
        block = block + linear(size, inputs) + linear(inputs, size) + norm(size)
    if isinstance(config, Gemma3nConfig):
        return block + altup(size, config.altup_num_inputs) + laurel(size, config.laurel_rank)
    assert isinstance(config, Gemma4Config)
    experts = config.experts
    if experts is not None:
        expert = 3 * size * experts.intermediate_size
        idle = (experts.num_experts - experts.top_k) * expert
        block = block + linear(size, experts.num_experts) + norm(size + experts.num_experts)
        block = block + Block(experts.top_k * expert, idle) + norm(3 * size)
    return block + Block(other=1)


def visible_tokens(tokens: int, window: int = 0) -> int:
    """Sum over positions 0..tokens-1 of the tokens each one sees."""
    if not window or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window
