"""The tolerances of all tests, on logits and logprobs; no test states a looser one of its own.

Golden logits have a standard deviation near 0.5.
"""

GOLDEN_FLOAT32 = 2e-5  # against the outputs of another implementation
CROSS_PATH_FLOAT32 = 1e-4  # one of our paths against another: chunked, batched, resumed
