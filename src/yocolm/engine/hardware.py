"""How fast a machine is, as the cost model wants it: measured here, or from a data sheet. No torch.

A file is one JSON object with the fields of ``Hardware``. Three come with the package: ``h100`` and
``h200``, from data sheets, and ``epyc-2core``, measured. ``cpu`` is this machine as it was last
calibrated (``engine/calibrate.py``), else ``epyc-2core``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from yocolm.errors import ConfigError
from yocolm.models.spec import ModelSpec
from yocolm.ops.native.build import BuildError, cache_folder

Source = Literal["measured", "data sheet", "generic"]
Device = Literal["cpu", "cuda"]
Curve = tuple[tuple[int, float], ...]  # by tokens, ascending from 1 on

PACKAGED = Path(__file__).resolve().parent.parent / "hardware"
CALIBRATED = "hardware-"  # how the files of calibrations begin, in the cache folder
_DEFAULTS: dict[str, str] = {"cpu": "epyc-2core", "cuda": "h100"}
_LONGEST = 64  # entries of a curve


@dataclass(frozen=True)
class Hardware:
    """A machine's rates, and for the one model it was calibrated with, the seconds of its halves.

    weight_bandwidth, kv_bandwidth, state_bandwidth: bytes a second reached by linears, by scans of
        KV (global and windows), and by states that are read and written.
    matrix_rates: (tokens, FLOP/s) of bfloat16 linears; float32 takes twice the time.
    attention_rate: FLOP/s of the attention (or retention) of chunks.
    step_seconds, sequence_seconds, chunk_seconds, token_seconds: outside the model, a step, and in
        it each sequence, each entry of several tokens and each token of those.
    layer_seconds, mixing_seconds: of a layer, whatever it computes, and what its first half's token
        mixing adds to it for every entry of several tokens.
    draw_seconds: a token drawn, beside its logits; draw_elements: logits a second that draws pass;
        logits_factor: by how much logits take longer than other linears.
    swap_bandwidth: bytes a second to where preempted state goes; memory_bytes: of the device.
    model: ``fingerprint`` of the model that the tables hold for; write_table, read_table,
        logits_table: (tokens, seconds) of its halves and its logits, contexts and states apart.
    """

    name: str
    source: Source
    device: Device
    memory_bytes: int
    weight_bandwidth: float
    kv_bandwidth: float
    state_bandwidth: float
    matrix_rates: Curve
    attention_rate: float
    step_seconds: float
    sequence_seconds: float
    chunk_seconds: float
    token_seconds: float
    layer_seconds: float
    mixing_seconds: float
    draw_seconds: float
    draw_elements: float
    swap_bandwidth: float
    logits_factor: float = 1.0
    note: str = ""
    model: str = ""
    write_table: Curve = ()
    read_table: Curve = ()
    logits_table: Curve = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float":
                least = 0.0 if field.name.endswith("_seconds") else math.ulp(0.0)
                object.__setattr__(self, field.name, _number(field.name, value, least))
            elif field.type == "Curve":
                object.__setattr__(self, field.name, _curve(field.name, value))
            elif field.type == "str" and not isinstance(value, str):
                raise ConfigError(f"hardware: {field.name}={value!r} must be text")
        _choice("source", self.source, get_args(Source))
        _choice("device", self.device, get_args(Device))
        memory = int(_number("memory_bytes", self.memory_bytes, 1))
        object.__setattr__(self, "memory_bytes", memory)
        if not self.matrix_rates:
            raise ConfigError("hardware: matrix_rates is empty; give [tokens, FLOP/s] pairs")

    def matrix_rate(self, tokens: int, dtype_bytes: int = 2) -> float:
        """FLOP/s of linears over so many tokens, between the points of ``matrix_rates``."""
        rate = _interpolate(self.matrix_rates, tokens)
        return rate * min(1.0, 2 / dtype_bytes)

    def holds_for(self, spec: ModelSpec, dtype_bytes: int) -> bool:
        """Whether the tables are this model's."""
        return bool(self.write_table) and self.model == fingerprint(spec, dtype_bytes)

    def to_json(self) -> str:
        """The text of a file."""
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(self).items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, where: str = "hardware") -> Hardware:
        """What ``to_json`` gave. Raises ConfigError naming the field that is wrong."""
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where} holds {type(data).__name__}; it must be a JSON object")
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(data) - set(known))
        optional = {"logits_factor", "note", "model", "write_table", "read_table", "logits_table"}
        missing = sorted(set(known) - set(data) - optional)
        if unknown or missing:
            what = f"has the unknown fields {unknown}" if unknown else f"lacks the fields {missing}"
            raise ConfigError(f"{where} {what}; the fields are {', '.join(known)}")
        try:
            return cls(**data)
        except (ConfigError, OverflowError) as error:  # of integers beyond all floats
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def load(
        cls, name: str | Path, spec: ModelSpec | None = None, dtype_bytes: int = 2
    ) -> Hardware:
        """A packaged machine by name, "cpu" as calibrated, or a file. Raises ConfigError.

        With ``spec``, "cpu" is the calibration with this model if there is one.
        """
        text = str(name)
        if text == "cpu":
            return calibrated_cpu(spec, dtype_bytes) or cls.load(_DEFAULTS["cpu"])
        packaged = PACKAGED / f"{text.lower()}.json"
        path = packaged if text.lower() in names() else Path(name)
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"hardware {text!r} is neither a file that can be read ({error}) nor one of "
                f"{', '.join(('cpu', *names()))}"
            ) from None

    @classmethod
    def generic(cls, device: str = "cpu") -> Hardware:
        """For a machine that nobody has measured: the packaged one of its kind."""
        kind = device.split(":")[0]
        known = cls.load(_DEFAULTS.get(kind, _DEFAULTS["cpu"]))
        note = f"not calibrated: the figures of {known.name}"
        return replace(known, name=f"generic-{known.device}", source="generic", note=note)


def names() -> tuple[str, ...]:
    """The machines that come with the package."""
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.json")))


def fingerprint(spec: ModelSpec, dtype_bytes: int) -> str:
    """Tells models of different sizes or widths of number apart."""
    return hashlib.sha256(f"{dtype_bytes} {spec}".encode()).hexdigest()[:16]


def save(hardware: Hardware, path: Path) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".hardware", delete=False, encoding="utf-8"
    ) as file:
        file.write(hardware.to_json())
    try:
        os.replace(file.name, path)
    except OSError:
        Path(file.name).unlink(missing_ok=True)
        raise


def calibrated_cpu(spec: ModelSpec | None = None, dtype_bytes: int = 2) -> Hardware | None:
    """The newest calibration of this machine's CPU, one with this model first."""
    try:
        paths = sorted(cache_folder().glob(f"{CALIBRATED}*.json"), key=_modified, reverse=True)
    except (BuildError, OSError):
        return None
    found = [one for one in map(read_calibration, paths) if one is not None and one.device == "cpu"]
    if spec is not None:
        found.sort(key=lambda one: not one.holds_for(spec, dtype_bytes))
    return found[0] if found else None


def read_calibration(path: Path) -> Hardware | None:
    """A file of the cache; None if it is not there, damaged, or of another version."""
    try:
        return Hardware.from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError):
        return None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _interpolate(curve: Curve, x: float) -> float:
    """Linear between the points, constant outside them."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in zip(curve, curve[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def _number(name: str, value: Any, least: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < least:
        sign = "at least 0" if least == 0 else "above 0"
        raise ConfigError(f"{name}={value!r} must be a number {sign}")
    return float(value)


def _curve(name: str, value: Any) -> Curve:
    wrong = f"{name}={value!r} must be pairs [tokens, value], at most {_LONGEST}, tokens ascending"
    if not isinstance(value, list | tuple) or len(value) > _LONGEST:
        raise ConfigError(wrong)
    points = []
    for point in value:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise ConfigError(wrong)
        points.append((int(_number(name, point[0], 1)), _number(name, point[1], math.ulp(0.0))))
    if any(one[0] >= other[0] for one, other in zip(points, points[1:], strict=False)):
        raise ConfigError(wrong)
    return tuple(points)


def _choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(known)}")
