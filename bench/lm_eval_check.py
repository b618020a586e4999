"""Scores of lm-evaluation-harness over HTTP beside those of the engine: see check_clients.sh.

python bench/lm_eval_check.py client URL > over_http.json    with lm-eval installed
python bench/lm_eval_check.py offline over_http.json         with yocolm installed
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parents[1] / "src" / "yocolm" / "bundled"
TOLERANCE = 1e-4
QUESTIONS = [
    ("It is a truth universally", [" acknowledged", " forgotten", " green"], 0),
    ("Emma Woodhouse, handsome, clever, and", [" seven", " rich", " the of"], 1),
    ("She was very", [" happy", " seldom sea", " which"], 0),
    ("Mr. Darcy", [" upon", " was", " of of"], 1),
    ("They walked together in the", [" garden", " because", " éclair"], 0),
    ("“My dear Mr. Bennet,” said his", [" lady", " lord of", " and"], 0),
]
TASK = """
task: austen
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc}}
"""


def client(url: str) -> None:
    """Run the task as lm-eval does; print every context, continuation and score."""
    lm_eval = import_module("lm_eval")  # not there where the offline half runs
    task_manager = import_module("lm_eval.tasks").TaskManager

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test.jsonl"
        rows = [{"text": t, "choices": c, "label": label} for t, c, label in QUESTIONS * 5]
        file.write_text("\n".join(json.dumps(row) for row in rows))
        (Path(folder) / "austen.yaml").write_text(TASK.format(file=file))
        found: Any = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "bundled",
                "base_url": f"{url}/v1/completions",
                "tokenizer": str(BUNDLED),
                "num_concurrent": 8,
                "max_retries": 1,
            },
            tasks=["austen"],
            task_manager=task_manager(include_path=folder),
            batch_size=4,
        )
    scores = [
        {"context": arguments[0], "continuation": arguments[1], "score": list(response[0])}
        for sample in found["samples"]["austen"]
        for arguments, response in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    accuracy = found["results"]["austen"]["acc,none"]
    print(json.dumps({"accuracy": accuracy, "scores": scores}))


def offline(path: str) -> int:
    """The same scores by the engine alone; 1 if one differs by more than the tolerance."""
    from yocolm import LLM, SamplingParams

    data = json.loads(Path(path).read_text())
    llm = LLM("bundled")
    tokenizer = llm.get_tokenizer()
    worst = 0.0
    for entry in data["scores"]:
        whole = tokenizer.encode(entry["context"] + entry["continuation"])
        first = len(tokenizer.encode(entry["context"]))
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        [output] = llm.generate([whole], params)
        scored = list(zip(whole, output.prompt_logprobs or [], strict=True))[first:]
        total = sum(entry[token].logprob for token, entry in scored if entry is not None)
        greedy = all(entry[token].rank == 1 for token, entry in scored if entry is not None)
        worst = max(worst, abs(total - entry["score"][0]))
        if greedy != bool(entry["score"][1]):
            worst = float("inf")
    print(
        f"accuracy {data['accuracy']}, {len(data['scores'])} scores, worst difference {worst:.2g}"
    )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(sys.argv[2])
    else:
        sys.exit(offline(sys.argv[2]))
