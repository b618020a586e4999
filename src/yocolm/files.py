"""JSON files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yocolm.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is absent or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes an indented JSON object, ending in a newline."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
