"""How far a model sees: its context and the base of its rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from yocolm.config import LlamaConfig, ModelConfig, YocoConfig


def with_context(config: ModelConfig, length: int, rope_theta: float | None) -> ModelConfig:
    """``config`` for windows of ``length`` tokens, with another base of the rotary embedding.

    The context grows to ``length`` where it is shorter. ``rope_theta`` None keeps the bases. A
    YOCO takes it in both halves, as its authors do; a Gemma in its full attention alone, since
    its windows do not grow.
    """
    length = max(length, config.max_position_embeddings)
    if rope_theta is None:
        return replace(config, max_position_embeddings=length)
    if isinstance(config, LlamaConfig):
        rope = replace(config.rope, theta=rope_theta)
        return replace(config, max_position_embeddings=length, rope=rope)
    if isinstance(config, YocoConfig):
        mixer, cross = (
            replace(part, rope=replace(part.rope, theta=rope_theta))
            for part in (config.mixer, config.cross)
        )
        return replace(config, max_position_embeddings=length, mixer=mixer, cross=cross)
    full = replace(config.full, rope=replace(config.full.rope, theta=rope_theta))
    return replace(config, max_position_embeddings=length, full=full)
