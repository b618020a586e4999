"""Stages of one training: their settings, weights that pass on, and resumption in any of them."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks as world
from layouts import write_layout
from training import MODELS, values, write_texts
from yocolm.config import GemmaConfig, LlamaConfig, YocoConfig, parse_config
from yocolm.errors import CheckpointError, ConfigError
from yocolm.models.registry import load_model
from yocolm.train import stages as stages_module
from yocolm.train.context import with_context
from yocolm.train.data_lock import locked
from yocolm.train.distributed import Ranks
from yocolm.train.settings import ParallelSettings, TrainSettings, parse_settings
from yocolm.train.stages import plan_stages, train, train_stages
from yocolm.train.trainer import Trainer

STAGES = [
    {"sequence_length": 16, "tokens": 90},  # of 32 a step: 3 steps
    {"sequence_length": 24, "tokens": 96, "rope_theta": 5e4, "learning_rate": 1e-3},
    {"sequence_length": 32, "tokens": 100, "batch_size": 1, "accumulate": 3},
]


def configuration(folder: Path, model: str = "yoco", **train: Any) -> dict[str, Any]:
    found = values(folder, model, **train)
    del found["train"]["steps"]
    return {**found, "stages": [dict(stage) for stage in STAGES]}


def staged(folder: Path, model: str = "yoco", **train: Any) -> TrainSettings:
    if not (folder / "a.txt").exists():
        write_texts(folder)
    return parse_settings(configuration(folder, model, **train))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(str(folder), torch.float32, "cpu")[0].state_dict()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainSettings, dict[str, float]]:
    """Settings of a training through all its stages, and its figures."""
    s = staged(tmp_path_factory.mktemp("finished"))
    return s, train(s, io.StringIO())


@pytest.fixture
def copied(finished: tuple[TrainSettings, dict[str, float]], tmp_path: Path) -> TrainSettings:
    """The same, in a folder of its own: a run may be moved."""
    s = finished[0]
    shutil.copytree(s.output_dir, tmp_path / "run")
    return replace(s, output_dir=str(tmp_path / "run"))


def test_the_plan(tmp_path: Path) -> None:
    s = staged(tmp_path, warmup_steps=2)
    last = replace(s.stages[2], decay_fraction=0.5, final_ratio=0.0)
    s = replace(s, rope_theta=2e4, export_dtype="bfloat16", stages=[*s.stages[:2], last])
    first, second, third = plan_stages(s)
    root = tmp_path / "run"
    assert [stage.folder.name for stage in (first, second, third)] == [
        "stage-0-16",
        "stage-1-24",
        "stage-2-32",
    ]
    assert [stage.settings.train.steps for stage in (first, second, third)] == [3, 2, 2]
    assert [stage.settings.rope_theta for stage in (first, second, third)] == [2e4, 5e4, None]
    assert [stage.settings.export_dtype for stage in (first, second, third)] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    assert first.settings.model == s.model and second.settings.train.learning_rate == 1e-3
    assert second.settings.model == str(root / "stage-0-16" / "final")
    assert third.settings.model == str(root / "stage-1-24" / "final")
    assert third.final == root / "final" and third.exported == root / "stage-2-32" / "final"
    assert (third.settings.train.batch_size, third.settings.train.accumulate) == (1, 3)
    for stage in (first, second, third):
        assert stage.settings.data.cache_dir == str(root / "cache") and not stage.settings.stages
        o = stage.settings.train
        decay = (0.5, 0.0) if stage is third else (0.2, 0.1)
        assert o.warmup_steps == 2 and (o.decay_fraction, o.final_ratio) == decay
    assert len({stage.settings.seed for stage in (first, second, third)}) == 3


def test_weights_of_sources_are_merged(tmp_path: Path) -> None:
    given = configuration(tmp_path)
    given["data"]["weights"] = {"sea": 2, "shore": 1}
    given["stages"][1]["weights"] = {"sea": 0}
    plans = plan_stages(parse_settings(given))
    assert [stage.settings.data.weights for stage in plans] == [
        {"sea": 2.0, "shore": 1.0},
        {"sea": 0.0, "shore": 1.0},
        {"sea": 2.0, "shore": 1.0},
    ]


def test_every_stage_has_a_source_with_a_weight(tmp_path: Path) -> None:
    """What no stage uses may be 0; the weights of a folder are checked before the first stage."""
    given = configuration(tmp_path)
    given["data"]["weights"] = {"sea": 0, "shore": 0}
    for stage in given["stages"]:
        stage["weights"] = {"sea": 1}
    assert plan_stages(parse_settings(given))[2].settings.data.weights == {"sea": 1.0, "shore": 0.0}
    del given["stages"][1]["weights"]
    with pytest.raises(ConfigError, match=r"data\.weights is 0 for every source"):
        parse_settings(given)

    write_layout(tmp_path / "L")
    given["data"] |= {"sources": {}, "folder": str(tmp_path / "L"), "weights": {"CC": 0}}
    for stage in given["stages"]:
        stage["weights"] = None
    given["stages"][2]["weights"] = {"StarCoder": 0}
    with pytest.raises(ConfigError, match=r"^stages\.2: data\.weights is 0 for every source; give"):
        train(parse_settings(given), io.StringIO())
    assert not (tmp_path / "run" / "stage-0-16").exists()


def test_stages_pass_their_weights_on(copied: TrainSettings) -> None:
    """What the second started from is, bit for bit, what the first ended with."""
    second = plan_stages(copied)[1].settings
    begun = Trainer(replace(second, output_dir=f"{second.output_dir}-again"), io.StringIO())
    ended = weights_of(Path(copied.output_dir) / "stage-0-16" / "final")
    assert all(torch.equal(value, ended[name]) for name, value in begun.model.state_dict().items())
    assert begun.config.max_position_embeddings == 24 and begun.step == 0


def test_what_is_written(finished: tuple[TrainSettings, dict[str, float]]) -> None:
    s, figures = finished
    root = Path(s.output_dir)
    folders = (root / "stage-0-16" / "final", root / "stage-1-24" / "final", root / "final")
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    bases = [
        {config[half]["rope_theta"] for half in ("self_decoder_attn", "cross_decoder_attn")}
        for config in configs
    ]
    assert bases == [{10000.0}, {5e4}, {5e4}]
    assert [config["max_position_embeddings"] for config in configs] == [16, 24, 32]
    record = json.loads((root / "final" / "training.json").read_text())
    assert [stage["steps"] for stage in record["stages"]] == [3, 2, 2]
    assert record["stages"][-1]["validation"] == figures == record["validation"]
    assert len(record["settings"]["stages"]) == 3
    assert not (root / "stage-2-32" / "final").exists()


def test_a_run_that_is_cut_off_goes_on(
    finished: tuple[TrainSettings, dict[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a stage, at its end and at the very start of one."""
    s, expected = finished
    s = replace(s, output_dir=str(tmp_path / "run"), train=replace(s.train, save_every=1))
    advance, done, begun = Trainer._advance, 0, []
    for cut, stage in ((1, 0), (3, 1), (4, 1), (6, 2)):  # of 3 + 2 + 2 steps

        def dies(self: Trainer, cut: int = cut) -> None:
            nonlocal done
            if done == cut:
                raise RuntimeError("cut off")
            done += 1
            advance(self)

        monkeypatch.setattr(Trainer, "_advance", dies)
        out = io.StringIO()
        with pytest.raises(RuntimeError, match="cut off"):
            train(s, out)
        assert f"stages.{stage} of 3" in out.getvalue()
        begun.append(out.getvalue().count(" of 3: "))
    monkeypatch.setattr(Trainer, "_advance", advance)
    out = io.StringIO()
    assert train(s, out) == expected and "resumed at step 1" in out.getvalue()
    assert begun == [1, 2, 1, 2]  # finished stages are not begun again
    one, other = (weights_of(Path(each.output_dir) / "final") for each in (s, finished[0]))
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_stage_that_was_not_noted_as_finished(
    copied: TrainSettings, finished: tuple[TrainSettings, dict[str, float]]
) -> None:
    """Killed between the export and the note of it."""
    (Path(copied.output_dir) / "stage-2-32" / "done.json").unlink()
    out = io.StringIO()
    assert train(copied, out) == finished[1]
    assert "stages.2 of 3" in out.getvalue() and "stages.1 of 3" not in out.getvalue()


def test_a_finished_training_stays_as_it_is(
    finished: tuple[TrainSettings, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    s, expected = finished
    monkeypatch.setattr(stages_module, "Trainer", None)
    out = io.StringIO()
    assert train(s, out) == expected
    assert out.getvalue() == f"all 3 stages are finished: {Path(s.output_dir) / 'final'}\n"


def test_a_stage_may_be_taken_away_and_added(
    copied: TrainSettings, finished: tuple[TrainSettings, dict[str, float]]
) -> None:
    def context() -> int:
        config = json.loads((Path(copied.output_dir) / "final/config.json").read_text())
        return config["max_position_embeddings"]

    note = json.loads((Path(copied.output_dir) / "stage-1-24/done.json").read_text())
    two = replace(copied, stages=copied.stages[:2])
    assert train(two, io.StringIO()) == note["validation"] and context() == 24
    out = io.StringIO()
    assert train(copied, out) == finished[1] and context() == 32
    assert "stages.0 of 3" not in out.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stage", r"stage-0-16 .*train\.steps was 3, is 10"),
        ("first length", r"stages\.0: data\.sequence_length was 16, is 20"),
        ("last length", r"stage-2-32 .*stages\.1: data\.sequence_length was 24, is 28"),
        ("train", r"train\.weight_decay was 0\.1, is 0\.5"),
        ("seed", r"seed was 1, is 5"),
    ],
)
def test_settings_of_a_finished_stage_are_fixed(
    finished: tuple[TrainSettings, dict[str, float]], change: str, message: str
) -> None:
    s = finished[0]
    changed = {
        "stage": replace(s, stages=[replace(s.stages[0], tokens=320), *s.stages[1:]]),
        "first length": replace(
            s, stages=[replace(s.stages[0], sequence_length=20, tokens=120), *s.stages[1:]]
        ),
        "last length": replace(
            s, stages=[s.stages[0], replace(s.stages[1], sequence_length=28), s.stages[2]]
        ),
        "train": replace(s, train=replace(s.train, weight_decay=0.5)),
        "seed": replace(s, seed=5),
    }
    with pytest.raises(ConfigError, match=message):
        train(changed[change], io.StringIO())
    free = replace(s, train=replace(s.train, log_every=1), export_dtype="float32")
    assert train(free, io.StringIO()) == finished[1]


def test_two_trainings_in_one_folder_are_refused(
    finished: tuple[TrainSettings, dict[str, float]],
) -> None:
    s, figures = finished
    with locked(Path(s.output_dir) / ".lock"), pytest.raises(ConfigError, match="is in use: ano"):
        train(s, io.StringIO())
    assert train(s, io.StringIO()) == figures
    assert not (Path(s.output_dir) / ".lock").exists()


def test_a_damaged_note(copied: TrainSettings) -> None:
    (Path(copied.output_dir) / "stage-0-16" / "done.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*done\.json: .*; delete it"):
        train(copied, io.StringIO())


def on_a_rank(ranks: Ranks, s: TrainSettings) -> tuple[dict[str, float], str]:
    out = io.StringIO()
    return train_stages(s, out, ranks), out.getvalue()


def test_stages_on_two_ranks(
    finished: tuple[TrainSettings, dict[str, float]], tmp_path: Path
) -> None:
    """The second stage under another strategy; against one rank."""
    whole = finished[0]
    s = replace(whole, output_dir=str(tmp_path / "run"), stages=whole.stages[:1])
    begun = world.run(2, on_a_rank, replace(s, parallel=ParallelSettings("ddp")))
    assert begun[0][0] == begun[1][0] and begun[1][1] == ""
    s = replace(s, stages=whole.stages[:2], parallel=ParallelSettings("fsdp"))
    (figures, said), (others, silent) = world.run(2, on_a_rank, s)
    assert figures == others and silent == ""
    assert "stages.0 of 2" in said and "resumed at step 3" in said and "stages.1 of 2" in said
    note = json.loads((Path(whole.output_dir) / "stage-1-24/done.json").read_text())
    expected = note["validation"]
    assert figures["nll_per_token"] == pytest.approx(expected["nll_per_token"], rel=1e-4)
    one = weights_of(Path(whole.output_dir) / "stage-1-24" / "final")
    for name, value in weights_of(tmp_path / "run" / "final").items():
        assert torch.allclose(value, one[name], rtol=0.02, atol=2e-3), name


@pytest.mark.parametrize("family", MODELS)
def test_bases_of_all_families(family: str) -> None:
    """Both halves of a YOCO, full attention of a Gemma; written and read back."""
    fields = {**MODELS[family], "vocab_size": 40, "max_position_embeddings": 64}
    before = parse_config(fields)
    for length, expected in ((48, 64), (96, 96)):
        config = parse_config(with_context(before, length, 5e4).to_hf())
        assert config.max_position_embeddings == expected
        if isinstance(config, YocoConfig):
            assert config.mixer.rope.theta == config.cross.rope.theta == 5e4
        elif isinstance(config, LlamaConfig):
            assert config.rope.theta == 5e4
        else:
            assert isinstance(before, GemmaConfig)
            assert config.full.rope.theta == 5e4
            assert config.sliding.rope == before.sliding.rope
    assert with_context(before, 64, None) == before


def test_a_run_of_one_stage_takes_another_base(tmp_path: Path) -> None:
    write_texts(tmp_path)
    given = {**values(tmp_path, "llama", steps=1), "rope_theta": 5e4}
    one = Trainer(parse_settings(given), io.StringIO())
    assert one.model.config.rope.theta == 5e4  # type: ignore[union-attr]
