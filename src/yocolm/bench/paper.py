"""`yocolm bench paper`: memory, prefill and throughput of a YOCO and its twin. No torch.

Every number is measured, in a process of its own on this machine (`bench/paper_cell.py`), or
predicted, by the formulas of `models/spec.py` and the engine's cost model on a hardware file. Times
are those of this engine: prompts in steps of `chunk` tokens, then all sequences decode together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from yocolm.bench.paper_reference import GENERATED, HARDWARE, HEADLINE, PAIR, RATIOS
from yocolm.bench.simulated import Setup
from yocolm.config import LlamaConfig, YocoConfig
from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings
from yocolm.errors import ConfigError
from yocolm.models.activations import activation_bytes
from yocolm.models.spec import DEFAULT_PAGE_SIZE, ModelSpec, model_spec

Side = Literal["yoco", "transformer"]
Models = dict[Side, dict[str, Any]]
SIDES: tuple[Side, ...] = ("yoco", "transformer")
PARTS = ("weights", "kv", "state", "activations")
SHARE = 32  # a length of which less than this many times GENERATED is left has fewer generated
MOST_SEQS = 256  # sequences at once, where more would fit

# Runs a cell of the study: what to do, the side, the prompt and the tokens behind it.
Measure = Callable[[str, Side, int, int], dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """A pair on a machine.

    hardware: of each side, as a calibration holds for one model.
    batch: sequences, for what is at equal batch; chunk: tokens of a step.
    threads: of this machine's CPU; 0 for another machine.
    budget: seconds that a measurement may take by its prediction; 0 measures nothing.
    """

    pair: str
    configs: dict[Side, YocoConfig | LlamaConfig]
    hardware: dict[Side, Hardware]
    lengths: tuple[int, ...]
    dtype: str = "bfloat16"
    batch: int = 1
    chunk: int = 2048
    generate: int = GENERATED
    budget: float = 0.0
    repeats: int = 1
    note: str = ""
    free_memory: int = 0
    threads: int = 0

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def generated(self, length: int) -> int:
        """Of a length: at most one token of ``SHARE``, as in the paper's shortest context."""
        return max(2, min(self.generate, length // SHARE))

    def weights(self, side: Side) -> int:
        """Bytes of a side's weights."""
        return model_spec(self.configs[side]).weight_bytes(self.dtype_bytes)

    @property
    def beside_paper(self) -> bool:
        """Whether it is what the paper measured."""
        return self.pair.lower() == PAIR.lower() and self.hardware["yoco"].name == HARDWARE


@dataclass
class _Predicted:
    """One side of a study, by formulas."""

    study: Study
    side: Side
    spec: ModelSpec = field(init=False)
    cost: CostModel = field(init=False)

    def __post_init__(self) -> None:
        study = self.study
        self.spec = model_spec(study.configs[self.side])
        hardware = study.hardware[self.side]
        self.cost = CostModel(self.spec, study.dtype_bytes, hardware)

    def memory(self, length: int, batch: int) -> dict[str, int]:
        """Bytes by part at the end of ``length`` tokens, the pools' scratch places included."""
        study, spec, size = self.study, self.spec, self.study.dtype_bytes
        prompt = length - study.generated(length)
        tokens = min(study.chunk, batch * prompt)
        pages = batch * spec.num_pages(length, DEFAULT_PAGE_SIZE) + bool(spec.global_stores)
        return {
            "weights": spec.weight_bytes(size),
            "kv": pages * spec.page_bytes(DEFAULT_PAGE_SIZE, size),
            "state": (batch + 1) * spec.slot_bytes(size),
            "activations": activation_bytes(
                study.configs[self.side],
                tokens,
                rows=min(batch, max(1, tokens // prompt)),
                sequences=min(batch, -(-tokens // prompt)),
                dtype_bytes=size,
                threads=study.threads,
            ),
        }

    def prefill(self, length: int, batch: int) -> float:
        """Seconds until every sequence has its first token."""
        prompt = length - self.study.generated(length)
        return batch * self.cost.solo_ttft(prompt, self.study.chunk)

    def decode(self, length: int, batch: int) -> float:
        """Seconds of a step in which all sequences decode, in the middle of their generation."""
        load = StepLoad()
        self.cost.add_decodes(load, batch, length - self.study.generated(length) / 2)
        return self.cost.steady_seconds(load)

    def throughput(self, length: int, batch: int) -> float:
        """Generated tokens a second of prefill and generation."""
        count = self.study.generated(length)
        whole = self.prefill(length, batch) + (count - 1) * self.decode(length, batch)
        return batch * count / whole

    def most_sequences(self, length: int) -> int:
        """How many fit in the hardware's memory, as the engine divides it."""
        study = self.study
        hardware, config = study.hardware[self.side], study.configs[self.side]
        try:
            room = Setup(config, hardware, EngineSettings(), study.dtype_bytes).kv_memory()
        except ConfigError:  # not even the weights do
            return 0
        return min(room // self.spec.bytes(length, DEFAULT_PAGE_SIZE, study.dtype_bytes), MOST_SEQS)


def run_study(
    study: Study, measure: Measure | None = None, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """All lengths. Without ``measure`` everything is predicted.

    Raises ConfigError if a length is too short to have a prompt.
    """
    sides: dict[Side, _Predicted] = {side: _Predicted(study, side) for side in SIDES}
    for length in study.lengths:
        if length < 64:
            raise ConfigError(f"length {length} is too short; give at least 64 tokens")
    rows = []
    for length in study.lengths:
        models: Models = {side: _cell(study, sides[side], length) for side in SIDES}
        if measure is not None:
            _measure_row(study, length, models, measure, say)
        rows.append(_row(study, length, models))
    hardware = study.hardware["yoco"]
    return {
        "pair": study.pair,
        "hardware": hardware.name,
        "hardware_source": hardware.source,
        "hardware_note": hardware.note,
        "memory_bytes": hardware.memory_bytes,
        "beside_paper": study.beside_paper,
        "dtype": study.dtype,
        "batch": study.batch,
        "chunk": study.chunk,
        "note": study.note,
        "parameters": {side: sides[side].spec.num_params for side in SIDES},
        "headline": _headline(rows) if study.beside_paper else [],
        "rows": rows,
    }


def _headline(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures that the paper is known for, beside ours."""
    known = {row["length"]: row["ratios"] for row in rows}
    return [
        {"what": what, "length": length, "paper": RATIOS[what][length], "ours": found}
        for what, name, length in HEADLINE
        if length in known and (found := known[length][name]) is not None
    ]


def _number(predicted: float) -> dict[str, Any]:
    return {"value": predicted, "source": "predicted", "predicted": predicted, "measured": None}


def _cell(study: Study, side: _Predicted, length: int) -> dict[str, Any]:
    """What is predicted for one side at one length."""
    batch, most = study.batch, side.most_sequences(length)
    memory = side.memory(length, batch)
    total = sum(memory.values())
    return {
        "memory": {part: _number(size) for part, size in memory.items()},
        "total": _number(total),
        "fits": total <= study.hardware[side.side].memory_bytes,
        "prefill": _number(side.prefill(length, batch)),
        "decode": _number(side.decode(length, batch)),
        "throughput": _number(side.throughput(length, batch)),
        "most_sequences": most,
        "most_throughput": _number(side.throughput(length, most)) if most else None,
        "errors": [],
    }


def _measure_row(
    study: Study,
    length: int,
    models: Models,
    measure: Measure,
    say: Callable[[str], None],
) -> None:
    """Measure what fits the machine and the budget, the sides in turn."""
    count = study.generated(length)
    expected = {
        side: cell["prefill"]["predicted"] + (count - 1) * cell["decode"]["predicted"]
        for side, cell in models.items()
    }
    sides: list[Side] = [
        side
        for side, cell in models.items()
        if cell["total"]["predicted"] <= study.free_memory and expected[side] <= study.budget
    ]
    times: dict[Side, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(study.repeats):
        for side in sides:
            say(f"{length} tokens, {side}: {expected[side]:.1f} s predicted, turn {turn + 1}")
            times[side].append(measure("time", side, length - count, count))
    for side in sides:
        say(f"{length} tokens, {side}: memory")
        memory = measure("memory", side, length - count, count)
        _stand(models[side], study.batch, count, times[side], memory)


def _stand(
    cell: dict[str, Any],
    batch: int,
    count: int,
    times: list[dict[str, Any]],
    memory: dict[str, Any],
) -> None:
    """Have what was measured stand instead of predictions; what failed is kept as an error."""
    cell["errors"] = [found["error"] for found in (*times, memory) if "error" in found]
    good = [found for found in times if "error" not in found]
    if good:
        _put(cell["prefill"], [found["prefill"] for found in good])
        _put(cell["decode"], [(found["whole"] - found["prefill"]) / (count - 1) for found in good])
        _put(cell["throughput"], [batch * count / found["whole"] for found in good])
        cell["process_peak"] = max(found["process_peak"] for found in good)
    if "error" not in memory:
        for part in PARTS:
            _put(cell["memory"][part], [memory[part]])
        _put(cell["total"], [sum(memory[part] for part in PARTS)])


def _put(number: dict[str, Any], values: Sequence[float]) -> None:
    number.update(value=statistics.median(values), source="measured", measured=list(values))


def _row(study: Study, length: int, models: Models) -> dict[str, Any]:
    ours, theirs = models["yoco"], models["transformer"]
    ratios = {
        "memory": _ratio(theirs["total"], ours["total"]),
        "prefill": _ratio(theirs["prefill"], ours["prefill"]),
        "throughput": _ratio(ours["throughput"], theirs["throughput"]),
        "most_throughput": _ratio(ours["most_throughput"], theirs["most_throughput"]),
    }
    return {
        "length": length,
        "generated": study.generated(length),
        "models": models,
        "ratios": ratios,
        "paper": {name: found.get(length) for name, found in RATIOS.items()},
    }


def _ratio(over: dict[str, Any] | None, under: dict[str, Any] | None) -> dict[str, Any] | None:
    """How many times; "mixed" where one was measured and the other is predicted."""
    if over is None or under is None:
        return None
    sources = {over["source"], under["source"]}
    source = sources.pop() if len(sources) == 1 else "mixed"
    predicted = over["predicted"] / under["predicted"]
    return {"value": over["value"] / under["value"], "source": source, "predicted": predicted}
