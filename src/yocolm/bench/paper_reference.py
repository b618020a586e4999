"""What the YOCO paper (arXiv 2405.05254, section 4.4 and figures 7, 9, 10) reports. No torch."""

from __future__ import annotations

K, M = 1024, 1024**2
LENGTHS = (32 * K, 64 * K, 128 * K, 256 * K, 512 * K, M)
GENERATED = 1024  # of every length so many tokens are generated, the others are the prompt
PAIR, HARDWARE = "3B", "h100"

# How many times less memory and time, and how many times more tokens a second, by length.
RATIOS: dict[str, dict[int, float]] = {
    "memory": dict(zip(LENGTHS, (1.95, 2.32, 3.01, 4.16, 6.39, 9.38), strict=True)),
    "prefill": dict(zip(LENGTHS, (2.87, 5.05, 8.36, 15.55, 30.3, 71.82), strict=True)),
    "throughput": dict(zip(LENGTHS, (2.72, 2.57, 2.77, 4.37, 9.56), strict=False)),
}
HEADLINE = (  # of which metric, by which of our ratios, at what length
    ("memory", "memory", M),
    ("prefill", "prefill", 512 * K),
    ("prefill", "prefill", M),
    ("throughput", "most_throughput", 512 * K),
)
# What its text gives of the models themselves: (YOCO, Transformer).
VALUES: dict[str, dict[int, tuple[float | None, float]]] = {
    "memory_gib": {M: (12.4, 12.4 * 9.38)},
    "prefill_seconds": {512 * K: (180 / 30.3, 180.0), M: (None, 300.0)},
    "throughput": {512 * K: (43.1, 4.5)},
}
ACCOUNT = (
    "Memory: the paper's GB are GiB, as 9.38 times 12.4 GB would be less than weights and KV of "
    "the Transformer alone. YOCO's 12.4 GiB at 1M leave 2 GiB beside weights and KV; a step of "
    "2,048 tokens of this engine holds 0.2. A ratio of 1.95 at 32K means that its Transformer held "
    "3 GiB or more beside weights and KV. It does not say in which pieces prompts were computed.",
    "Prefill: 180 s at 512K are 250 TFLOP/s of the H100's 989; the data sheet file assumes 396 in "
    "attention and 593 in linears, so both models are faster here, by about the same factor, and "
    "the ratio is nearly the same as long as one card is enough.",
    "Prefill at 1M: the Transformer's KV is 104 GiB, more than a card has, and the paper does not "
    "say on how many it ran. Its 300 s are 1.7 times those at 512K, where attention alone is four "
    "times as much, and with 71.8 times YOCO would take 4.2 s, less than its 5.9 s at 512K. The "
    "prediction is for one card, had it the memory: that ratio is of other runs than the paper's. "
    "By FLOPs alone it is 26 at 512K and 51 at 1M.",
    "Throughput: generated tokens over the time of prefill and generation. The paper names no "
    "batch sizes. Its Transformer fits once at 512K: 4.5 tokens/s are 228 s for 1,024 tokens, 180 "
    "of them prefill. YOCO's 43.1 are 24 s for each 1,024. Both are given here, for one sequence "
    "and for all that fit into nine tenths of the memory: from 64K to 256K the paper's ratio lies "
    "between the two, at 32K and 512K above both.",
    "Decoding: a step here reads the global KV once for every layer of the second half, as the "
    "paper's does, and both models pay overheads of a step and a layer that the data sheet file "
    "assumes. The paper's gated retention works in chunks of 256 tokens, the engine's of 128.",
)
