"""The tolerances of all tests, on logits and logprobs; no test states a looser one of its own.

Golden logits have a standard deviation near 0.5.
"""

GOLDEN_FLOAT32 = 2e-5  # against the outputs of another implementation
GOLDEN_FLOAT64 = 1e-11  # against another implementation without any float32 in it
CROSS_PATH_FLOAT32 = 1e-4  # one of our paths against another: chunked, batched, resumed

# One path against another, by the model's dtype. On the tests' tiny models (logits with a standard
# deviation of 1) the largest differences seen are 2e-14, 4e-6 and 0.033; neighbouring bfloat16
# between 2 and 4 are 0.016 apart.
CROSS_PATH = {
    "float64": 1e-11,
    "float32": CROSS_PATH_FLOAT32,
    "bfloat16": 0.1,
}

# Operations against a float64 reference on the same inputs, in units of the largest value.
OPS = {
    "float64": 1e-12,
    "float32": 5e-5,
    "bfloat16": 5e-3,
}
