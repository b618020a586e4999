"""Training configurations: every error names the key, the value and what to do."""

import copy
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from training import values
from yocolm.config import YocoConfig, parse_config
from yocolm.errors import ConfigError
from yocolm.train.settings import (
    DataSettings,
    DistillSettings,
    OptimSettings,
    ParallelSettings,
    SourceSettings,
    StageSettings,
    TokenizerSettings,
    TrainSettings,
    load_settings,
    parse_settings,
)

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
PAGE = Path(__file__).parents[2] / "docs" / "training.md"
GONE = object()
STAGE = {"sequence_length": 32, "tokens": 640}
NOTHING = {"sea": 0, "shore": 0}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The tests' configuration with the key at ``path`` set, or taken out."""
    result = copy.deepcopy(values(Path("there")))
    *parents, last = path.split(".")
    target = result
    for parent in parents:
        target = target.setdefault(parent, {})
    if value is GONE:
        del target[last]
    else:
        target[last] = value
    return result


def test_values_arrive() -> None:
    s = parse_settings(changed("train.optimizer", "muon"))
    assert s.train.optimizer == "muon" and s.train.steps == 6 and s.seed == 1
    assert s.data.sources["sea"].weight == 3.0 and s.data.sources["shore"].weight == 1.0
    assert s.train.keep == OptimSettings.keep


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_are_valid(path: Path) -> None:
    load_settings(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", 3, "the configuration: unknown key 'step'; known are output_dir"),
        ("train.lr", 1, "train: unknown key 'lr'; known are steps"),
        ("data.sources.sea.file", "x", "data.sources.sea: unknown key 'file'; known are files"),
        ("tokenizer.vocab", 3, "tokenizer: unknown key 'vocab'"),
        ("output_dir", GONE, "the configuration: the key 'output_dir' is missing"),
        ("model", GONE, "the configuration: the key 'model' is missing"),
        ("data", GONE, "the configuration: the key 'data' is missing"),
        ("train", GONE, "the configuration: the key 'train' is missing"),
        ("train.steps", GONE, "train: the key 'steps' is missing"),
        ("data.sources", GONE, "data.sources is empty; give at least one source, or data.folder"),
        ("data.sources.sea.files", GONE, "data.sources.sea: the key 'files' is missing"),
    ],
)
def test_unknown_and_missing_keys(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_settings(changed(key, value))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.steps", "many", "train.steps is 'many'; it must be of type int"),
        ("train.steps", 1.5, "train.steps is 1.5; it must be of type int"),
        ("train.steps", True, "train.steps is True; it must be of type int"),
        ("train.tensorboard", 1, "train.tensorboard is 1; it must be of type bool"),
        ("train.learning_rate", "fast", "train.learning_rate is 'fast'; it must be a number"),
        ("train.learning_rate", None, "train.learning_rate is None; it must be of type"),
        ("train.learning_rate", "nan", "train.learning_rate is 'nan'; it must be a finite number"),
        ("train.optimizer", 3, "train.optimizer is 3; it must be of type str"),
        ("model", 3, "model is 3; it must be of type str or dict"),
        ("data", [], "data must hold keys and values (a mapping), not a list"),
        ("data.sources", ["x"], "data.sources must hold keys and values (a mapping), not a list"),
        ("data.sources.sea", "x.txt", "data.sources.sea must hold keys and values (a mapping), "),
        ("train", None, "train must hold keys and values (a mapping), not nothing"),
        ("data.sources.sea.files", "x", "data.sources.sea.files is 'x'; it must be of type list"),
        ("data.validation", [3], "data.validation is [3]; it must be a list of strings"),
        ("tokenizer.train_on", ["sea", 1], "tokenizer.train_on is ['sea', 1]; it must be a list"),
        ("train.steps", "1.5e0", "train.steps is '1.5e0'; it must be of type int"),
        ("train.steps", "inf", "train.steps is 'inf'; it must be of type int"),
        ("train.wandb", True, "train.wandb is True; it must be of type str"),
        ("data.weights", ["sea"], "data.weights must hold keys and values (a mapping), not a list"),
        ("data.weights", {"sea": "x"}, "data.weights.sea is 'x'; it must be a number"),
        ("stages", {"tokens": 3}, "stages is {'tokens': 3}; it must be of type list"),
        ("stages", [3], "stages.0 must hold keys and values (a mapping), not 3"),
        ("stages", [STAGE, {"tokens": 3}], "stages.1: the key 'sequence_length' is missing"),
        ("stages", [{**STAGE, "length": 3}], "stages.0: unknown key 'length'; known are sequence"),
        ("stages", [{**STAGE, "tokens": "4k"}], "stages.0.tokens is '4k'; it must be of type int"),
        ("stages", [{**STAGE, "weights": {"sea": []}}], "stages.0.weights.sea is []; it must be"),
        ("distill", {"weight": 1}, "distill: the key 'teacher' is missing"),
        ("distill", "bundled", "distill must hold keys and values (a mapping), not 'bundled'"),
    ],
)
def test_wrong_types(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_settings(changed(key, value))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.optimizer", "sgd", "train.optimizer is 'sgd'; it must be one of adamw, muon"),
        ("train.schedule", "cos", "one of cosine, linear, polynomial, constant, wsd"),
        ("train.dtype", "float16", "train.dtype is 'float16'; it must be one of float32, bfloat16"),
        ("train.device", "gpu", "train.device is 'gpu'; it must be one of auto, cpu, cuda"),
        ("export_dtype", "fp32", "export_dtype is 'fp32'; it must be one of float32, bfloat16"),
        ("train.steps", 0, "train.steps is 0; it must be above 0"),
        ("train.keep", 0, "train.keep is 0; it must be above 0"),
        ("train.grad_clip", 0, "train.grad_clip is 0.0; it must be above 0"),
        ("train.validation_tokens", 0, "train.validation_tokens is 0; it must be above 0"),
        ("train.matrix_learning_rate", 0, "train.matrix_learning_rate is 0.0; it must be above 0"),
        ("train.warmup_steps", -1, "train.warmup_steps is -1; it must be at least 0"),
        ("train.weight_decay", -0.1, "train.weight_decay is -0.1; it must be at least 0"),
        ("train.beta2", 1, "train.beta2 is 1.0; it must be at least 0 and below 1"),
        ("train.final_ratio", 2, "train.final_ratio is 2.0; it must be from 0 to 1"),
        ("train.decay_fraction", 0, "train.decay_fraction is 0.0; it must be above 0"),
        ("train.decay_fraction", 1.5, "train.decay_fraction is 1.5; it must be at most 1"),
        ("data.sequence_length", 0, "data.sequence_length is 0; it must be above 0"),
        ("data.sources", {}, "data.sources is empty; give at least one source"),
        ("data.validation", [], "data.validation is empty; give at least one file"),
        ("data.sources.sea.weight", -1, "data.sources.sea.weight is -1.0; it must be at least 0"),
        ("data.sources.sea.files", [], "data.sources.sea.files is empty"),
        ("tokenizer.train_on", ["land"], "tokenizer.train_on names 'land', which is not in data"),
        ("tokenizer.vocab_size", 256, "tokenizer.vocab_size is 256; it must be at least 257"),
        ("tokenizer.path", GONE, "tokenizer.path is missing; name a tokenizer.json"),
        ("seed", -1, "seed is -1; it must be at least 0"),
        ("rope_theta", 0, "rope_theta is 0.0; it must be above 0"),
        ("train.power", 0, "train.power is 0.0; it must be above 0"),
        ("train.peak_flops", 0, "train.peak_flops is 0.0; it must be above 0"),
        ("train.steps", GONE, "the key 'steps' is missing; give it, or a list of stages"),
        ("parallel.strategy", "tp", "parallel.strategy is 'tp'; it must be one of auto, ddp, fsdp"),
        ("parallel.shard_size", 0, "parallel.shard_size is 0; it must be above 0"),
        ("data.folder", "there", "data.folder is 'there', but data.sources are given too"),
        ("data.validation_split", 1, "data.validation_split is 1.0; it must be at least 0 and"),
        ("data.validation_split", 0.1, "data.validation_split is 0.1, but data.validation names"),
        ("data.weights", {"land": 1}, "data.weights names 'land', which is not in data.sources"),
        ("data.weights", {"sea": -1}, "data.weights.sea is -1.0; it must be at least 0"),
        ("data.weights", {"sea": 0, "shore": 0}, "data.weights is 0 for every source; give one"),
        ("stages", [STAGE], "train.steps is 6, but the tokens of the stages say how long each"),
        ("stages", [{**STAGE, "tokens": 0}], "stages.0.tokens is 0; it must be above 0"),
        ("stages", [{**STAGE, "rope_theta": -1}], "stages.0.rope_theta is -1.0; it must be above"),
        ("stages", [{**STAGE, "warmup_steps": -1}], "stages.0.warmup_steps is -1; it must be at"),
        ("stages", [{**STAGE, "final_ratio": 2}], "stages.0.final_ratio is 2.0; it must be from 0"),
        ("stages", [{**STAGE, "decay_fraction": 0}], "stages.0.decay_fraction is 0.0; it must be"),
        ("stages", [{**STAGE, "decay_fraction": 2}], "stages.0.decay_fraction is 2.0; it must be"),
        ("stages", [STAGE, {**STAGE, "schedule": "x"}], "stages.1.schedule is 'x'; it must be one"),
        ("stages", [{**STAGE, "weights": {"land": 1}}], "stages.0.weights names 'land', which"),
        ("stages", [{**STAGE, "weights": NOTHING}], "stages.0.weights is 0 for every source"),
        ("train.peak_flops", 10**400, "; it must be a finite number"),
        ("distill", {"teacher": "x", "weight": 2}, "distill.weight is 2.0; it must be from 0 to 1"),
        ("distill", {"teacher": "x", "temperature": 0}, "distill.temperature is 0.0; it must be"),
        ("distill", {"teacher": "x", "hidden_weight": -1}, "distill.hidden_weight is -1.0; it"),
    ],
)
def test_values_out_of_range(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_settings(changed(key, value))
    assert message in str(error.value)


def test_a_model_to_continue_from_brings_its_tokenizer() -> None:
    with_folder = changed("model", "some/folder")
    del with_folder["tokenizer"]
    assert parse_settings(with_folder).tokenizer.path is None
    with pytest.raises(ConfigError, match="tokenizer.path is missing"):
        parse_settings({**with_folder, "model": "random:160M"})


def write(tmp_path: Path, text: str | None = None) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text if text is not None else yaml.safe_dump(values(tmp_path)))
    return path


def test_numbers_that_yaml_reads_as_strings(tmp_path: Path) -> None:
    text = yaml.safe_dump(values(tmp_path)).replace("learning_rate: 0.003", "learning_rate: 1e-3")
    assert yaml.safe_load(text)["train"]["learning_rate"] == "1e-3"
    assert load_settings(write(tmp_path, text)).train.learning_rate == 1e-3


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path)
    overrides = [
        "train.steps=9",
        "seed=7",
        "train.learning_rate=2e-4",
        "data.sources.shore.weight=0.5",
        "tokenizer.train_on=[sea]",
        "train.matrix_learning_rate=null",
        "output_dir=a=b",
    ]
    s = load_settings(path, overrides)
    assert (s.train.steps, s.seed, s.train.learning_rate) == (9, 7, 2e-4)
    assert s.data.sources["shore"].weight == 0.5 and s.tokenizer.train_on == ["sea"]
    assert s.train.matrix_learning_rate is None and s.output_dir == "a=b"


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    given = changed("train.steps", GONE) | {"stages": [STAGE, {**STAGE, "tokens": "1.5e9"}]}
    s = load_settings(write(tmp_path, yaml.safe_dump(given)), ["stages.0.tokens=6e9"])
    assert [stage.tokens for stage in s.stages] == [6_000_000_000, 1_500_000_000]
    assert all(isinstance(stage.tokens, int) for stage in s.stages)


def test_overrides_of_members_of_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(changed("train.steps", GONE) | {"stages": [STAGE]}))
    s = load_settings(path, ["stages.0.rope_theta=640e3", "data.sources.sea.files.0=x.txt"])
    assert s.stages[0].rope_theta == 640_000.0 and s.data.sources["sea"].files == ["x.txt"]
    for override, name in (("stages.1.tokens=3", "1"), ("stages.x=3", "x"), ("stages.-1=3", "-1")):
        with pytest.raises(ConfigError, match=f"'{name}' names no member of a list of 1"):
            load_settings(path, [override])


def test_an_override_may_open_a_section(tmp_path: Path) -> None:
    without = changed("train", GONE)
    assert load_settings(write(tmp_path, yaml.safe_dump(without)), ["train.steps=3"]).train.steps


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "override 'train.steps' has no '='; write section.key=value"),
        ("train.stepz=3", "train: unknown key 'stepz'"),
        ("train.steps.more=3", "override 'train.steps.more=3': 'train.steps' is 6, not a section"),
        ("train.steps=[", "override 'train.steps=[' has a value that is not valid YAML"),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(write(tmp_path), [override])
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*absent.yaml: No such file"):
        load_settings(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_settings(write(tmp_path, "a: [1"))
    with pytest.raises(
        ConfigError, match=r"config\.yaml must hold keys and values \(a mapping\), not nothing"
    ):
        load_settings(write(tmp_path, ""), ["train.steps=3"])
    (tmp_path / "config.yaml").write_bytes(b"a: caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_settings(tmp_path / "config.yaml")


def documented() -> dict[str, str]:
    """Key -> default, of every row of the tables in docs/training.md."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("| `"):
            assert len(cells) == 3 and cells[2], line
            assert cells[0] not in rows
            rows[cells[0].strip("`")] = cells[1].strip("`").replace("\\|", "|")
    return rows


def test_the_page_lists_every_key_with_its_default() -> None:
    sections = {
        "": TrainSettings,
        "tokenizer.": TokenizerSettings,
        "data.": DataSettings,
        "data.sources.NAME.": SourceSettings,
        "train.": OptimSettings,
        "parallel.": ParallelSettings,
        "stages.N.": StageSettings,
        "distill.": DistillSettings,
    }
    nested = "tokenizer data train parallel stages distill".split()
    rows = documented()
    for prefix, cls in sections.items():
        for f in fields(cls):
            key = prefix + f.name
            if key in nested:
                continue
            default = rows.pop(key)
            if default == "required":
                with pytest.raises(TypeError):
                    cls(**{g.name: None for g in fields(cls) if g.name != f.name})
            else:
                required = {g.name: None for g in fields(cls)}
                del required[f.name]
                built = getattr(cls(**required), f.name)
                value = yaml.safe_load(default)
                assert built == (float(value) if isinstance(built, float) else value), key
    assert rows == {}


def test_a_file_that_holds_a_list(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- output_dir: x\n- model: bundled\n")
    wanted = r"list\.yaml must hold keys and values \(a mapping\), not a list"
    with pytest.raises(ConfigError, match=wanted):
        load_settings(path, ["train.steps=3"])


def test_the_examples_of_the_page() -> None:
    """The first is complete; the second, of stages, goes into it."""
    found = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    whole, staged = map(yaml.safe_load, found)
    settings = parse_settings(whole)
    assert isinstance(settings.model, dict)
    assert isinstance(parse_config(settings.model), YocoConfig)
    stages = parse_settings({**whole, **staged}).stages
    assert [stage.sequence_length for stage in stages] == [1 << 16, 1 << 18, 1 << 20]
    assert [stage.tokens for stage in stages] == [6_000_000_000, 4_000_000_000, 1_500_000_000]
    assert [stage.rope_theta for stage in stages] == [640_000, 5_000_000, 80_000_000]
