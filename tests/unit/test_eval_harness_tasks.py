"""Tasks of lm-evaluation-harness in this process; its metrics recomputed from other scores."""

import argparse
import importlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness_world import Naive, model_folder, small, text_of
from yocolm import cli_harness
from yocolm.cli_harness_arguments import add_harness
from yocolm.errors import MissingDependencyError, RequestError
from yocolm.eval import harness_tasks
from yocolm.eval.harness import TextModel
from yocolm.eval.harness_tasks import PAPER_TASKS, TaskOptions, adapter, evaluate, render

LENGTH = 256
QUESTIONS = [
    {"text": text_of(5 + i, i), "choices": [text_of(1 + j, 50 * i + j) for j in range(4)]}
    | {"label": i % 4, "answer": text_of(30, i)}
    for i in range(8)
]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ],
}
DOCUMENTS = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
}
WRITTEN = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["t"], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages' own


@pytest.fixture(autouse=True)
def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="module", params=["llama-tiny", "yoco-fla-gret-tiny", "gemma4"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Naive]:
    folder = model_folder(tmp_path_factory.mktemp("model"), request.param)
    return folder, Naive(folder, request.param, LENGTH)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return small(model_folder(tmp_path_factory.mktemp("model"), "yoco-fla-gret-tiny"), LENGTH)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of task files over one file of questions."""
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, fields in {"choice": CHOICE, "documents": DOCUMENTS, "written": WRITTEN}.items():
        write_task(folder, name, fields)
    return folder


def write_task(folder: Path, name: str, fields: dict[str, Any], **more: Any) -> None:
    data = folder.parent / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(folder.parent / "cache"),
        },
        "test_split": "test",
        "metadata": {"version": 1},
    }
    content = {"task": name, **source, **fields, **more}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))


def test_metrics_equal_those_of_whole_forward_passes(
    world: tuple[Path, Naive], tasks: Path
) -> None:
    folder, naive = world
    found = evaluate(
        small(folder, LENGTH), ["choice", "documents", "written"], include_path=[tasks]
    )
    results, right, right_by_length = found["results"], [], []
    for row in QUESTIONS:
        scores = [naive.loglikelihood(row["text"], f" {choice}")[0] for choice in row["choices"]]
        lengths = [len(choice) for choice in row["choices"]]
        by_length = [score / length for score, length in zip(scores, lengths, strict=True)]
        right.append(scores.index(max(scores)) == row["label"])
        right_by_length.append(by_length.index(max(by_length)) == row["label"])
    assert results["choice"]["acc,none"] == statistics.mean(right)
    assert results["choice"]["acc_norm,none"] == statistics.mean(right_by_length)
    error = statistics.stdev(map(float, right)) / math.sqrt(len(QUESTIONS))
    assert results["choice"]["acc_stderr,none"] == pytest.approx(error)
    total = sum(naive.rolling(row["answer"]) for row in QUESTIONS)
    size = sum(len(row["answer"].encode()) for row in QUESTIONS)
    bits = -total / size / math.log(2)
    assert results["documents"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-4)
    for sample in found["samples"]["written"]:
        text = naive.text(naive.greedy(sample["doc"]["text"], 8))
        assert sample["resps"] == [[text.split("t")[0]]]
    assert found["n-samples"]["choice"] == {"original": 8, "effective": 8}


def test_options_reach_the_tasks(model: TextModel, tasks: Path) -> None:
    options = TaskOptions(num_fewshot=2, limit=3, gen_kwargs={"max_gen_toks": 3, "until": []})
    write_task(tasks, "none", CHOICE, num_fewshot=0)
    found = evaluate(model, ["choice", "written", "none"], options, include_path=[tasks])
    assert found["n-shot"] == {"choice": 2, "written": 2, "none": 0}
    assert {len(samples) for samples in found["samples"].values()} == {3}
    for sample in found["samples"]["written"]:
        context, arguments = sample["arguments"][0]
        assert context.count("\n\n") == 2 and context.endswith(sample["doc"]["text"])
        assert {"max_gen_toks": 3, "until": [], "do_sample": False}.items() <= arguments.items()
        assert 0 < len(sample["resps"][0][0]) <= 3
    share = evaluate(model, ["choice"], TaskOptions(limit=0.5), include_path=[tasks])
    assert share["n-samples"]["choice"]["effective"] == 4


def test_examples_depend_on_the_seed(model: TextModel, tasks: Path) -> None:
    asked = []
    for seed in (1, 1, 2):
        options = TaskOptions(num_fewshot=2, limit=4, seed=seed)
        found = evaluate(model, ["choice"], options, include_path=[tasks])
        asked.append([sample["arguments"] for sample in found["samples"]["choice"]])
    assert asked[0] == asked[1] != asked[2]


def test_answers_are_kept_as_they_come_and_given_again(
    model: TextModel, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TaskOptions(use_cache=tmp_path / "answers.db")
    names = ["choice", "documents", "written"]
    plain = evaluate(model, names, include_path=[tasks])
    run, calls = model._run, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(model, "_run", interrupted)
    monkeypatch.setattr(model, "_width", 2)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, names, options, include_path=[tasks])
    monkeypatch.setattr(model, "_run", run)
    before = model.prompt_tokens
    again = evaluate(model, names, options, include_path=[tasks])
    asked = model.prompt_tokens - before
    assert again["results"].keys() == plain["results"].keys()
    assert again["results"]["choice"]["acc,none"] == plain["results"]["choice"]["acc,none"]
    before = model.prompt_tokens
    third = evaluate(model, names, options, include_path=[tasks])
    assert model.prompt_tokens == before < before + asked
    assert third["samples"]["written"] == plain["samples"]["written"]


def test_interrupted_answers_are_not_computed_again(
    model: TextModel, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    language_model = adapter(model)
    monkeypatch.setattr(language_model.cache_hook, "add_partial", lambda *a: kept.append(a))
    instance = importlib.import_module("lm_eval.api.instance").Instance
    for kind, arguments in (
        ("loglikelihood", ("the", " cat")),
        ("loglikelihood_rolling", ("the cat",)),
        ("generate_until", ("the", {"max_gen_toks": 2})),
    ):
        request = instance(kind, {}, arguments, 0)
        (answer,) = getattr(language_model, kind)([request])
        assert kept.pop() == (kind, arguments, answer) and not kept


def test_the_papers_tasks_by_one_name(model: TextModel, tasks: Path) -> None:
    for name in PAPER_TASKS:
        write_task(tasks, name, CHOICE)
    found = evaluate(model, ["paper"], TaskOptions(limit=1), include_path=[tasks])
    assert list(found["results"]) == [
        *("arc_challenge", "arc_easy", "boolq", "hellaswag"),
        *("openbookqa", "piqa", "winogrande", "sciq"),
    ]


def test_a_task_file_and_a_group(model: TextModel, tasks: Path) -> None:
    group = {
        "group": "both",
        "task": ["choice", "other"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    write_task(tasks, "other", CHOICE, doc_to_target="{{(label + 1) % 4}}")
    (tasks / "both.yaml").write_text(yaml.safe_dump(group))
    found = evaluate(model, ["both"], include_path=[tasks])
    parts = [found["results"][name]["acc,none"] for name in ("choice", "other")]
    assert found["groups"]["both"]["acc,none"] == pytest.approx(statistics.mean(parts))
    alone = evaluate(model, [str(tasks / "choice.yaml")])
    assert alone["results"]["choice"]["acc,none"] == parts[0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no tasks"),
        (["away"], "not-there.jsonl.*: the data of away cannot be read.*--include-path"),
        (["hub"], r"Couldn't reach 'some/data' on the Hub .*: the data of hub .* set HF_HOME to"),
        (["wrong"], "wrong cannot be loaded: .*correct the task file"),
        (["nowhere.yaml"], "task file nowhere.yaml does not exist"),
    ],
)
def test_tasks_that_cannot_be_run(
    model: TextModel,
    tasks: Path,
    names: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_task(tasks, "hub", CHOICE, dataset_path="some/data", dataset_kwargs={})
    write_task(tasks, "away", CHOICE, dataset_kwargs={"data_files": {"test": "not-there.jsonl"}})
    write_task(tasks, "wrong", CHOICE, output_type="telepathy")
    with pytest.raises(RequestError, match=message):
        evaluate(model, names, include_path=[tasks])


@pytest.mark.parametrize(
    ("mark", "message"), [("UNSAFE_CODE", "runs code"), ("MULTIMODAL", "images or sound")]
)
def test_tasks_of_other_kinds_are_refused(
    model: TextModel, tasks: Path, monkeypatch: pytest.MonkeyPatch, mark: str, message: str
) -> None:
    task = importlib.import_module("lm_eval.api.task").ConfigurableTask
    monkeypatch.setattr(task, mark, True, raising=False)
    before = model.prompt_tokens
    with pytest.raises(RequestError, match=f"task choice .*{message}"):
        evaluate(model, ["choice"], include_path=[tasks])
    assert model.prompt_tokens == before


def test_choices_that_a_task_shuffles_are_the_same_again(model: TextModel, tasks: Path) -> None:
    (tasks / "shuffled.py").write_text(
        "import random\n\ndef choices(doc):\n"
        "    return random.sample(doc['choices'], len(doc['choices']))\n"
    )
    write_task(tasks, "shuffled", {**CHOICE, "doc_to_choice": "TO_BE"})
    text = (tasks / "shuffled.yaml").read_text()
    (tasks / "shuffled.yaml").write_text(text.replace("TO_BE", "!function shuffled.choices"))
    asked = []
    for random_seed in (0, 0, 1):
        options = TaskOptions(limit=4, random_seed=random_seed)
        found = evaluate(model, ["shuffled"], options, include_path=[tasks])
        asked.append([sample["arguments"] for sample in found["samples"]["shuffled"]])
    assert asked[0] == asked[1] != asked[2]


def test_an_unknown_task_is_named_with_those_near(
    model: TextModel, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = importlib.import_module("lm_eval.tasks").TaskManager

    def without_defaults(include_path: Any, include_defaults: bool = True) -> Any:
        return manager(include_path=include_path, include_defaults=False)  # those take seconds

    monkeypatch.setattr("lm_eval.tasks.TaskManager", without_defaults)
    lines: list[str] = []
    evaluate(model, ["choice"], TaskOptions(limit=1), include_path=[tasks], notice=lines.append)
    assert lines == []
    with pytest.raises(RequestError, match="task 'chioce' is unknown: did you mean choice"):
        evaluate(model, ["chioce"], include_path=[tasks], notice=lines.append)
    assert len(lines) == 1 and "reading lm-eval's index of tasks" in lines[0]
    with pytest.raises(RequestError, match="is not a folder"):
        evaluate(model, ["choice"], include_path=[tasks / "choice.yaml"])


def test_without_the_package_it_is_named(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(harness_tasks, "import_module", missing)
    with pytest.raises(MissingDependencyError, match="pip install lm-eval"):
        evaluate(model, ["choice"])
    with pytest.raises(MissingDependencyError, match="pip install lm-eval"):
        adapter(model)


CHAT = """{%- for m in messages -%}
{%- if m.role == 'system' and no_system -%}{{ raise_exception('no system') }}{%- endif -%}
<{{ m.role }}>{{ m.content }}</{{ m.role }}>
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""


@pytest.mark.parametrize("refuses", [False, True])
def test_contexts_as_chats(tasks: Path, tmp_path: Path, refuses: bool) -> None:
    folder = model_folder(tmp_path / "model", "yoco-fla-gret-tiny")
    template = CHAT.replace("no_system", str(refuses).lower())
    (folder / "chat_template.jinja").write_text(template)
    model = small(folder, LENGTH)
    options = TaskOptions(chat=True, system_instruction="Be brief.", num_fewshot=1, limit=2)
    found = evaluate(model, ["written"], options, include_path=[tasks])
    for sample in found["samples"]["written"]:
        context = sample["arguments"][0][0]
        assert context.startswith("<user>" if refuses else "<system>Be brief.</system><user>")
        assert context.endswith(f"<user>{sample['doc']['text']}</user><assistant>")
        assert context.count("<assistant>") == 2
    open_end = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render(model, open_end, add_generation_prompt=False) == "<user>a</user><assistant>b"
    assert adapter(model).chat_template(True) == template


def test_a_chat_without_a_template_is_refused(model: TextModel, tasks: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        evaluate(model, ["written"], TaskOptions(chat=True, limit=1), include_path=[tasks])


def run_command(*options: str) -> int:
    parser = argparse.ArgumentParser()
    add_harness(parser.add_subparsers(dest="kind"))
    return cli_harness.run(parser.parse_args(["harness", *options]))


def test_the_command_prints_a_table_or_json(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path / "model", "llama-tiny")
    samples = tmp_path / "samples.jsonl"
    common = [str(folder), "--tasks", "choice,written", "--include-path", str(tasks)]
    common += ["--max-length", "128", "--kv-memory", "16MB", "--batch-size", "4"]
    assert run_command(*common, "--limit", "2", "--json", "--samples", str(samples)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["max_length"] == 128 and report["fast_prefill"] is True
    assert set(report["results"]) == {"choice", "written"}
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [line["task"] for line in lines] == ["choice"] * 2 + ["written"] * 2
    assert run_command(*common, "--gen-kwargs", "max_gen_toks=2,until=x", "--no-fast-prefill") == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["model", str(folder)]
    rows = [line.split() for line in table.splitlines()[6:]]
    assert [row[:4] for row in rows] == [
        ["choice", "0", "8", "acc"],
        ["acc_norm", *rows[1][1:]],
        ["written", "0", "8", "exact_match"],
    ]
    kept = samples.read_text()
    with pytest.raises(RequestError, match="task file none.yaml does not exist"):
        run_command(*common[:1], "--tasks", "none.yaml", *common[3:], "--samples", str(samples))
    assert samples.read_text() == kept
    nowhere = str(tmp_path / "nowhere" / "samples.jsonl")
    with pytest.raises(OSError, match="nowhere"):
        run_command("not-a-model", "--tasks", "choice", "--samples", nowhere)
    assert 0 <= float(rows[0][4]) <= 1 and 0 < float(rows[0][5]) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "neither a number of documents nor a share"),
        (["--limit", "2.5"], "'2.5' is neither"),
        (["--gen-kwargs", "temperature"], "'temperature' is not a generation argument"),
        (["--gen-kwargs", '{"until"'], "is not JSON"),
        (["--gen-kwargs", "[1]"], "is not a generation argument"),
        (["--batch-size", "0"], "'0' is not a whole number above 0"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_command("bundled", "--tasks", "choice", *options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("temperature=0.8,do_sample=True", {"temperature": 0.8, "do_sample": True}),
        ("until=end, max_gen_toks=3", {"until": "end", "max_gen_toks": 3}),
        ('{"until": ["a,b", "\\n"]}', {"until": ["a,b", "\n"]}),
    ],
)
def test_generation_arguments_are_read(text: str, arguments: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    add_harness(parser.add_subparsers(dest="kind"))
    given = ["harness", "bundled", "--tasks", "a,b", "--gen-kwargs", text]
    assert parser.parse_args(given).gen_kwargs == arguments
