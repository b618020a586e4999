"""Training data in the layout of YOCO's authors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_layout(folder: Path, split: str = "train", **changes: Any) -> None:
    """The authors' folder: two sources of two shards each; ``changes`` replace JSON files."""
    texts = {"CC": ["one", "two"], "StarCoder": ["a = 1", "b = 2"]}
    files: dict[str, Any] = {
        split: [{"name": "CC", "weight": 0.5}, {"name": "StarCoder", "weight": 0.2}],
        "CC": [str(folder / f"shard/CC/{i:05}.jsonl") for i in range(2)],
        "StarCoder": [f"shard/StarCoder/{i:05}.jsonl" for i in range(2)],
        **changes,
    }
    for name, field in (("CC", "text"), ("StarCoder", "content")):
        for i, text in enumerate(texts[name]):
            path = folder / f"shard/{name}/{i:05}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({field: text}) + "\n")
    (folder / "json").mkdir(exist_ok=True)
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / "json" / f"{name}.json").write_text(text)
