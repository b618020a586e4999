"""The engine reproduces the references whatever the size of the prompt's chunks."""

import pytest
import torch

from references import ALL, DATA, expected
from tolerances import GOLDEN_FLOAT32
from yocolm import LLM, SamplingParams

CHUNKS = (1, 7, 64, 128, 256, 300)


def engine(name: str, chunk: int) -> LLM:
    return LLM(
        str(DATA / name),
        dtype="float32",
        max_num_batched_tokens=chunk,
        kv_memory="16MiB",
        skip_tokenizer_init=True,
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ALL)
def test_greedy_generation(name: str, chunk: int) -> None:
    reference = expected(name)
    count = len(reference.generated)
    params = SamplingParams(temperature=0, max_tokens=count, logprobs=4, ignore_eos=True)
    (output,) = engine(name, chunk).generate([{"prompt_token_ids": reference.prompt}], params)
    sample = output.outputs[0]
    assert list(sample.token_ids) == reference.generated
    assert sample.logprobs is not None
    wanted = reference.generated_logits.log_softmax(-1)
    for row, logprobs in zip(wanted, sample.logprobs, strict=True):
        for token, entry in logprobs.items():
            assert abs(entry.logprob - float(row[token])) < GOLDEN_FLOAT32


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ALL)
def test_prompt_logprobs(name: str, chunk: int) -> None:
    reference = expected(name)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    tokens = reference.token_ids.tolist()
    (output,) = engine(name, chunk).generate([{"prompt_token_ids": tokens}], params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    got = [
        entry[token].logprob
        for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        if entry
    ]
    wanted = reference.logits.log_softmax(-1)[:-1].gather(1, reference.token_ids[1:, None])[:, 0]
    assert float((torch.tensor(got) - wanted).abs().max()) < GOLDEN_FLOAT32
