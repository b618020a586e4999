"""``LLM`` as a script written for vLLM uses it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripted import tokenizer
from tiny import FAMILIES, assert_empty
from yocolm import LLM, SamplingParams
from yocolm.config import ModelConfig
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.sampling_params import GuidedParams
from yocolm.errors import ConfigError, RequestError
from yocolm.fields import write_json
from yocolm.models.registry import build_model
from yocolm.models.weights import save_weights

PROMPTS = ["hello world", "he", "naïve 日本", "world or world, hello?"]


def saved(folder: Path, config: ModelConfig, **generation: Any) -> Path:
    """A model of ``config`` with random weights, in the vocabulary of the tests' tokenizer."""
    config = replace(config, vocab_size=tokenizer().vocab_size + 3)  # as padded vocabularies are
    model = build_model(config, "cpu", torch.float32)
    init = model.init_weights
    assert callable(init)
    init(0)
    save_weights(model, folder, config, generation_config=generation)
    tokenizer().inner.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "</s>"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), FAMILIES["retention"])


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_memory="2MB", max_num_seqs=3, max_num_batched_tokens=16)


def idle(llm: LLM) -> None:
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check()
    assert_empty(llm.engine)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_texts_in_texts_out(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=12)
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        ids = llm.get_tokenizer().encode(output.prompt)
        assert output.prompt_token_ids == ids and output.finished
        sample = output.outputs[0]
        assert sample.text == llm.get_tokenizer().decode(sample.token_ids)
    assert len({output.request_id for output in outputs}) == 4
    idle(llm)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=0, ignore_eos=True) for n in (30, 1, 12, 3, 2)]
    prompts = [[i + 1] * (9 - i) for i in range(5)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(tokens) for tokens in tokens_of(outputs)] == [30, 1, 12, 3, 2]
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        (alone,) = llm.generate(prompt, one)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_forms_of_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    ids = llm.get_tokenizer().encode("hello")
    forms: list[Any] = ["hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}]
    for form in forms:
        assert len(llm.generate(form, params)) == 1
    together = tokens_of(llm.generate(forms, params))
    assert together == [together[0]] * 5
    assert llm.generate([], params) == []
    assert len(llm.generate("hello")[0].outputs[0].token_ids) <= 16
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("hello", [params, params])


def test_prompts_may_be_any_iterable(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    wanted = tokens_of(llm.generate(PROMPTS, params))
    assert tokens_of(llm.generate((prompt for prompt in PROMPTS), params)) == wanted
    assert tokens_of(llm.generate(PROMPTS, (params for _ in PROMPTS))) == wanted
    assert len(llm.generate((prompt for prompt in PROMPTS[:1]), params)) == 1
    ids: Any = iter([1, 2, 3])
    assert len(llm.generate(ids, params)) == 1


def test_wrong_types_are_refused(llm: LLM) -> None:
    anything: Any = llm
    for prompts in (None, 5, object()):
        with pytest.raises(RequestError, match="give text, token ids, or a list of prompts"):
            anything.generate(prompts)
    for params in ({"temperature": 1}, "greedy", 5):
        with pytest.raises(RequestError, match="give SamplingParams, or one for each"):
            anything.generate(["he", "lo"], params)
    with pytest.raises(RequestError, match="SamplingParams"):
        anything.generate(["he"], [{"temperature": 1}])
    idle(llm)


def test_one_bad_request_leaves_nothing_queued(llm: LLM) -> None:
    good = SamplingParams(max_tokens=4)
    with pytest.raises(RequestError, match="prompt token id 9999"):
        llm.generate(["hello", "world", [9999], "he"], good)
    idle(llm)
    with pytest.raises(RequestError, match="no tokens"):
        llm.generate(["hello", ""], good)
    idle(llm)
    bad = SamplingParams(max_tokens=4, logit_bias={9999: 1})
    with pytest.raises(RequestError, match="logit_bias token id 9999"):
        llm.generate(["hello", "world"], [good, bad])
    idle(llm)
    assert len(llm.generate(["hello", "world"], good)) == 2


def test_an_interruption_leaves_nothing_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.engine.step, iter(range(4))

    def interrupted() -> list[RequestOutput]:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=9, n=2))
    monkeypatch.undo()
    idle(llm)
    assert len(llm.generate(PROMPTS)) == 4


def test_logprobs_have_the_shapes_of_vllm(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0, n=2)
    (output,) = llm.generate("hello world", params)
    scores = output.prompt_logprobs
    assert scores is not None and scores[0] is None
    assert len(scores) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], scores[1:], strict=True):
        assert entry is not None and list(entry) == [token]
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
    for sample in output.outputs:
        assert sample.logprobs is not None
        for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
            assert len(entry) == 2 and entry[token].rank == 1 and entry[token].logprob < 0


def test_tokens_that_only_pad_the_vocabulary(llm: LLM) -> None:
    """The model may draw ids that the tokenizer does not know: they have no text."""
    padding = tokenizer().vocab_size + 1
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, logit_bias={padding: 100})
    sample = llm.generate("hello", params)[0].outputs[0]
    assert sample.token_ids == [padding] * 3 and sample.text == ""
    assert sample.logprobs is not None and sample.logprobs[0][padding].decoded_token == ""
    assert llm.generate("hello", SamplingParams(stop="x", logit_bias={padding: 100}))


def test_chat(llm: LLM, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError, match="no chat template: .* give one as chat_template"):
        llm.chat(messages, params)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }} {{ more }}{% endfor %}"
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"more": "or"}}
    (output,) = llm.chat(messages, params, **options)
    assert output.prompt == "hello or"
    (wanted,) = llm.generate("hello or", params)
    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    several = llm.chat([messages, messages * 2], params, **options)
    assert [output.prompt for output in several] == ["hello or", "hello orhello or"]
    assert llm.chat([], params) == []
    with pytest.raises(RequestError, match="messages is 5; give a list"):
        llm.chat(5, params)  # pyright: ignore[reportArgumentType]
    ids_only = LLM(folder, skip_tokenizer_init=True, kv_memory="1MB")
    with pytest.raises(RequestError, match="chat needs a tokenizer"):
        ids_only.chat(messages, **options)


def test_turns_end_at_the_models_stop_strings(tmp_path: Path) -> None:
    """Those of a chat only, and as an end of text does."""
    llm = LLM(saved(tmp_path, FAMILIES["retention"], stop_strings="oo"), kv_memory="1MB")
    messages, template = [{"role": "user", "content": "he"}], "{{ messages[0].content }}"
    token = tokenizer().encode("o")[0]
    drawn: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "logit_bias": {token: 100}}

    def told(**more: Any) -> tuple[str, str | None, Any]:
        params = SamplingParams(**drawn, **more)
        [output] = llm.chat(messages, params, chat_template=template)
        assert params.stop == list(more.get("stop", ())), "the caller's parameters have changed"
        sample = output.outputs[0]
        return sample.text, sample.finish_reason, sample.stop_reason

    assert told() == ("", "stop", "oo")
    assert told(stop=["x"]) == ("", "stop", "oo")
    assert told(stop=["o"]) == ("", "stop", "o")
    assert told(min_tokens=3)[1] == "stop"
    assert told(ignore_eos=True) == ("ooooo", "length", None)
    assert told(structured_outputs=GuidedParams(regex="o{5}"))[0] == "ooooo"
    assert llm.generate("he", SamplingParams(**drawn))[0].outputs[0].text == "ooooo"


def test_the_bundled_model_has_a_chat_template() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    (output,) = LLM().chat(messages, SamplingParams(max_tokens=1, seed=0), tools=[{"name": "f"}])
    assert output.prompt == 'Tools: [{"name": "f"}]\n\nSystem: Be kind.\n\nUser: Hi\n\nAssistant:'


def test_a_turn_of_the_bundled_model_ends_where_its_template_ends_it() -> None:
    messages = [{"role": "user", "content": "Say hello in exactly 3 words."}]
    params = SamplingParams(max_tokens=None, temperature=0.7, top_p=0.95, seed=1)
    [output] = LLM().chat(messages, params)
    sample = output.outputs[0]
    assert sample.finish_reason == "stop" and sample.stop_reason == "\n\n"
    assert sample.text and "\n\n" not in sample.text


def test_progress_goes_to_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["he", "hello"], SamplingParams(max_tokens=2), use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith("2/2 requests\n")
    llm.generate("he", SamplingParams(max_tokens=2))
    assert capsys.readouterr().err == ""


def test_end_of_text_comes_from_the_files(folder: Path, tmp_path: Path) -> None:
    assert LLM(str(folder), kv_memory="1MB").engine.eos_token_ids == {0}
    other = saved(tmp_path, FAMILIES["llama"], eos_token_id=[5, 6])
    llm = LLM(other, kv_memory="1MB")
    assert llm.engine.eos_token_ids == {0, 5, 6}
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={6: 100})
    (output,) = llm.generate("hello", params)
    assert output.outputs[0].token_ids == [6] and output.outputs[0].finish_reason == "stop"


def test_settings_and_dtypes(folder: Path) -> None:
    llm = LLM(folder, dtype="bfloat16", kv_memory="1MB", max_model_len=32, page_size=8)
    assert llm.engine.runner.state.pages[0][0].dtype == torch.bfloat16
    assert llm.engine.max_model_len == 32
    (output,) = llm.generate("hello", SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 32
    ids_only = LLM(folder, skip_tokenizer_init=True, kv_memory="1MB")
    assert ids_only.get_tokenizer() is None
    with pytest.raises(RequestError, match="no tokenizer"):
        ids_only.generate("hello")
    assert ids_only.generate([1, 2])[0].outputs[0].text == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_memory": 100},
        {"device": "abacus"},
        {"device": "meta"},
        {"device": "mps"},
        {"dtype": "int3"},
        {"page_size": 0},
    ],
)
def test_settings_that_cannot_be(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(*wrong.values())):
        LLM(folder, **wrong)


def test_seeded_weights() -> None:
    source = f"random:{Path(__file__).parents[1] / 'golden' / 'data' / 'yoco-fla-gret-tiny'}"
    params = SamplingParams(temperature=0, max_tokens=6)
    runs = [
        LLM(source, seed=seed, kv_memory="4MB").generate([1, 2, 3], params) for seed in (1, 1, 2)
    ]
    first, again, other = (tokens_of(outputs) for outputs in runs)
    assert first == again != other
