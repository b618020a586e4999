"""The whole path through the command line: train, inspect, evaluate, convert and generate."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from yocolm.cli import main
from yocolm.models.registry import BUNDLED

RANDOM = f"random:{Path(__file__).parents[1] / 'golden' / 'data' / 'yoco-fla-gret-tiny'}"
PARAGRAPH = (
    "The sea was calm and the little boat went slowly along the shore; the old man said nothing, "
    "and the boy, who was tired of asking, looked at the water and counted the waves. "
)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Standard output of a command that succeeds."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder trained for a few steps on a repeated paragraph, by `yocolm train`."""
    root = tmp_path_factory.mktemp("train")
    (root / "train.txt").write_text(PARAGRAPH * 60)
    (root / "held_out.txt").write_text(PARAGRAPH)
    settings = {
        "output_dir": str(root / "run"),
        "seed": 1,
        "tokenizer": {"path": str(root / "tokenizer.json"), "vocab_size": 320},
        "model": {
            "model_type": "yoco",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_self_decoder_layers": 1,
            "tie_word_embeddings": True,
            "self_decoder_attn": {"type": "gated_retention", "num_heads": 2},
            "cross_decoder_attn": {"num_heads": 2, "num_kv_heads": 1},
        },
        "data": {
            "sequence_length": 64,
            "sources": {"sea": {"files": [str(root / "train.txt")]}},
            "validation": [str(root / "held_out.txt")],
        },
        "train": {
            "steps": 400,
            "batch_size": 4,
            "learning_rate": 3e-3,
            "warmup_steps": 10,
            "dtype": "float32",
        },
    }
    config = root / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    assert main(["train", str(config), "train.steps=60"]) == 0
    return root / "run" / "final"


def test_a_trained_model_is_evaluated(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = trained.parents[1] / "train.txt"
    result = run_json(capsys, "eval", "perplexity", trained, text, "--context", 64)
    assert result["bytes"] == text.stat().st_size and result["context"] == 64
    assert result["stride"] == 32 and result["model"] == str(trained)
    nll = result["bits_per_byte"] * math.log(2) * result["bytes"] / result["tokens"]
    assert nll == pytest.approx(result["nll_per_token"])
    assert result["bits_per_byte"] < 2.0  # bytes of this text are worth 4.1 without a model
    [bucket] = result["by_position"]
    assert (bucket["from"], bucket["to"]) == (0, 64) and bucket["tokens"] > result["tokens"]
    table = run(
        capsys, "eval", "perplexity", trained, text, "--context", 128, "--dtype", "bfloat16"
    )
    assert "bits per byte" in table and "64-127" in table


def test_info_of_a_trained_model(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "info", trained, "--context", 64)
    weights = (trained / "model.safetensors").stat().st_size
    assert result["memory"]["weights"] == pytest.approx(weights, rel=0.1)
    assert result["transformer"]["memory"]["global_kv"] == 2 * result["memory"]["global_kv"]


def test_info_of_the_papers_model(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "info", "random:3B", "--context", "1M")
    memory, twin = result["memory"], result["transformer"]["memory"]
    assert memory["global_kv"] == 4_294_967_296 and memory["recurrent"] == 20_447_232
    assert twin["global_kv"] == 26 * memory["global_kv"]
    parts = [n for name, n in result["parameters"].items() if name != "total"]
    assert result["parameters"]["total"] == sum(parts)
    table = run(capsys, "info", "random:3B", "--context", "1M")
    assert "4.29 GB" in table and "20.4 MB" in table and "x 26" in table


def test_text_is_generated(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", trained, "The sea was", "--max-tokens", 12]
    greedy = run(capsys, *command, "--temperature", 0, "--no-stream")
    assert run(capsys, *command, "--temperature", 0, "--stream") == greedy
    assert run(capsys, *command, "--temperature", 0, "--echo") == "The sea was" + greedy
    ids = run_json(capsys, *command)["prompt_token_ids"]
    command[3:4] = ["--prompt-ids", ",".join(map(str, ids))]
    for option in ("--stream", "--no-stream"):
        echoed = run(capsys, *command, "--temperature", 0, "--echo", option)
        assert echoed == "The sea was" + greedy
    seeded = [run(capsys, *command, "--seed", 5) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_generated_json_has_everything(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", trained, "The sea was calm", "--max-tokens", 4, "--seed", 3]
    result = run_json(capsys, *command, "-n", 2, "--logprobs", 2, "--prompt-logprobs", 0)
    ids = result["prompt_token_ids"]
    assert result["prompt"] == "The sea was calm" and len(result["prompt_logprobs"]) == len(ids)
    assert result["prompt_logprobs"][0] is None
    for token, entry in zip(ids[1:], result["prompt_logprobs"][1:], strict=True):
        assert list(entry) == [str(token)] and entry[str(token)]["logprob"] <= 0
    assert [sample["index"] for sample in result["outputs"]] == [0, 1]
    for sample in result["outputs"]:
        assert len(sample["token_ids"]) == len(sample["logprobs"]) <= 4
        assert sample["finish_reason"] in ("length", "stop")
        own = [
            e[str(t)]["logprob"]
            for t, e in zip(sample["token_ids"], sample["logprobs"], strict=True)
        ]
        assert sample["cumulative_logprob"] == pytest.approx(sum(own), abs=1e-4)
    table = run(capsys, *command, "--logprobs", 1, "--prompt-logprobs", 1)
    assert "prompt" in table and "rank" in table


@pytest.mark.parametrize("name", ["yoco-gret-tiny", "yoco-swa-tiny"])
def test_a_converted_checkpoint_generates_the_same(
    name: str, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = load_file(golden / name / "expected.safetensors")
    prompt = expected["token_ids"][: int(expected["prompt_len"][0])].tolist()
    wanted = expected["generated_ids"].tolist()
    assert "wrote" in run(capsys, "convert", golden / name, tmp_path / "native")
    for folder in (golden / name, tmp_path / "native"):
        ids = ",".join(str(token) for token in prompt)
        command = ["generate", "--model", folder, "--prompt-ids", ids, "--temperature", 0]
        result = run_json(capsys, *command, "--ignore-eos", "--max-tokens", len(wanted))
        assert result["outputs"][0]["token_ids"] == wanted


def test_a_model_without_a_tokenizer_prints_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", RANDOM, "--prompt-ids", "1,2", "--temperature", 0]
    for option in ("--stream", "--no-stream"):
        out = run(capsys, *command, "--max-tokens", 3, "--ignore-eos", option)
        assert len(out.split(",")) == 3
        more = ["--max-tokens", 3, "--ignore-eos", option, "--echo"]
        assert run(capsys, *command, *more) == f"1,2,{out}"
    scored = run(capsys, *command, "--max-tokens", 0, "--prompt-logprobs", 0, "--echo")
    assert scored.endswith("\n1,2\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "no/such/folder"], "no/such/folder"),
        (["info", "random:5B"], "5B"),
        (["info", "random:"], "known presets: 160M"),
        (["generate", "--model", "", "text"], "model is empty"),
        (["generate", "--model", RANDOM, "text"], "tokenizer"),
        (["generate", "text", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt-file", "no-such-file"], "no-such-file"),
        (["eval", "perplexity", "bundled", "no-such-file"], "no-such-file"),
        (["convert", "no-such-folder", "out"], "no-such-folder does not exist"),
        (["train", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_errors_name_the_culprit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_the_bundled_model_continues_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "generate", "She had been forced into", "--max-tokens", 24, "--seed", 1)
    assert len(out.split()) >= 5
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 15_000_000


def test_a_message_in_the_form_of_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "Hi.", "--chat", "--system", "Be kind.", "--max-tokens", "1", "--seed"]
    found = run_json(capsys, *options, "1")
    assert found["prompt"] == "System: Be kind.\n\nUser: Hi.\n\nAssistant:"
    assert found["outputs"][0]["finish_reason"] == "length"
    for wrong, message in (
        (["x", "--system", "y"], "--system needs --chat"),
        (["--prompt-ids", "1", "--chat"], "leave out --prompt-ids"),
        (["x", "--chat", "--model", RANDOM], "chat needs a tokenizer"),
    ):
        assert main(["generate", *wrong]) == 1
        assert message in capsys.readouterr().err
