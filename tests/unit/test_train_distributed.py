"""Two ranks of a training, as real processes over gloo, against one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import ranks as world
from ranks import changed, make
from training import MODELS, trainer, values, write_texts
from yocolm.errors import ConfigError
from yocolm.models.registry import load_model
from yocolm.train.checkpoint import training_tensors
from yocolm.train.distributed import Ranks, micro_batches, strategy_of, whole
from yocolm.train.settings import TrainSettings, parse_settings
from yocolm.train.trainer import Trainer

SOURCES = Path(__file__).parents[2] / "src"
STEPS = 6
STRATEGIES = ("ddp", "fsdp")


def configuration(folder: Path, model: str = "yoco", **train: Any) -> dict[str, Any]:
    """Four windows a step, in micro-batches of at most two, and checkpoints of every third step."""
    options = {"steps": STEPS, "accumulate": 2, "save_every": 3, **train}
    return values(folder, model, **options)


def state_of(one: Trainer) -> dict[str, np.ndarray]:
    """Every parameter and every tensor of the optimisers, whole."""
    tensors = training_tensors(one.model, one.optimizers)
    return {name: whole(tensor).clone().numpy() for name, tensor in tensors.items()}


def train(ranks: Ranks, config: dict[str, Any], stop: int) -> dict[str, Any]:
    """Steps up to ``stop`` as a run would make them, with its checkpoints; what came out of it."""
    one = make(ranks, config)
    begun, figures = one.step, []
    while one.step < stop:
        figures.append(one.train_step())
        if one.step % one.s.train.save_every == 0:
            one.save()
    validation = one.validate(200)
    out = one.progress.out
    return {
        "begun": begun,
        "steps": [(each.loss, each.norm) for each in figures],
        "validation": validation["nll_per_token"],
        "state": state_of(one),
        "sampler": one.sampler.state_dict(),
        "said": out.getvalue() if out is not None else None,  # type: ignore[attr-defined]
        "local": sum(_held(p).numel() for p in one.model.parameters()),
    }


def _held(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def far(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest relative distance of any two tensors."""
    assert a.keys() == b.keys()
    return max(
        float(np.linalg.norm(a[name] - b[name]) / (np.linalg.norm(b[name]) + 1e-6)) for name in a
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_texts(path)
    return path


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, Any]:
    """The uninterrupted training of one rank, its checkpoints of steps 3 and 6 in ``one``."""
    return train(Ranks(), changed(configuration(folder), "one"), STEPS)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, one_rank: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The same on two ranks, in folders named after the strategies."""
    config = configuration(folder)
    return {
        name: world.run(2, train, changed(config, name, strategy=name), STEPS)
        for name in STRATEGIES
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_one_does(
    one_rank: dict[str, Any], two_ranks: dict[str, list[dict[str, Any]]], strategy: str
) -> None:
    first, second = two_ranks[strategy]
    for found in (first, second):
        assert found["begun"] == 0 and len(found["steps"]) == STEPS
        np.testing.assert_allclose(found["steps"], one_rank["steps"], rtol=2e-4)
        assert found["validation"] == pytest.approx(one_rank["validation"], rel=1e-4)
        assert found["sampler"] == one_rank["sampler"]
        assert far(found["state"], one_rank["state"]) < 1e-2
    assert first["steps"] == second["steps"] and same(first["state"], second["state"])
    assert first["said"] and second["said"] is None, "only one rank prints"


def test_a_sharded_model_is_shared(two_ranks: dict[str, list[dict[str, Any]]]) -> None:
    whole_model = two_ranks["ddp"][0]["local"]
    held = [found["local"] for found in two_ranks["fsdp"]]
    assert sum(held) == whole_model and max(held) < 0.52 * whole_model


def cut(folder: Path, source: str, target: str) -> Path:
    """The run ``source`` as a kill between steps 3 and 6 would have left it, in ``target``."""
    shutil.copytree(folder / source / "step-0000003", folder / target / "step-0000003")
    return folder / target


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_ranks_resume_bit_for_bit(
    folder: Path, two_ranks: dict[str, list[dict[str, Any]]], strategy: str
) -> None:
    cut(folder, strategy, f"{strategy}-again")
    config = changed(configuration(folder), f"{strategy}-again", strategy=strategy)
    for found, expected in zip(
        world.run(2, train, config, STEPS), two_ranks[strategy], strict=True
    ):
        assert found["begun"] == 3 and found["steps"] == expected["steps"][3:]
        assert same(found["state"], expected["state"])
        assert found["sampler"] == expected["sampler"]
        assert found["validation"] == expected["validation"]


@pytest.mark.parametrize(
    ("parallel", "share"),
    [({"strategy": "ddp"}, 1.0), ({"strategy": "fsdp", "shard_size": 2}, 0.5)],
)
def test_four_ranks(
    folder: Path, one_rank: dict[str, Any], parallel: dict[str, Any], share: float
) -> None:
    """Sums of more than two depend on their order, and groups of ranks may share a copy."""
    name = f"four-{parallel['strategy']}"
    config = configuration(folder)
    found = world.run(4, train, changed(config, name, **parallel), STEPS)
    cut(folder, name, f"{name}-again")
    again = world.run(4, train, changed(config, f"{name}-again", **parallel), STEPS)
    total = sum(parameter.size for parameter in parameters_of(one_rank["state"]))
    for one, resumed in zip(found, again, strict=True):
        np.testing.assert_allclose(one["steps"], one_rank["steps"], rtol=2e-4)
        assert one["local"] == pytest.approx(share * total, rel=0.02)
        assert resumed["begun"] == 3 and resumed["steps"] == one["steps"][3:]
        assert same(resumed["state"], one["state"])


def parameters_of(state: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [value for name, value in state.items() if name.startswith("model.")]


@pytest.mark.parametrize(
    ("source", "strategy"),
    [("one", "ddp"), ("one", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp"), ("ddp", ""), ("fsdp", "")],
)
def test_other_ranks_go_on_with_the_same_windows(
    folder: Path,
    one_rank: dict[str, Any],
    two_ranks: dict[str, list[dict[str, Any]]],
    source: str,
    strategy: str,
) -> None:
    name = f"{source}-to-{strategy or 'one'}"
    cut(folder, source, name)
    config = changed(configuration(folder), name, **({"strategy": strategy} if strategy else {}))
    if strategy:
        found, _ = world.run(2, train, config, STEPS)
    else:
        found = train(Ranks(), config, STEPS)
    assert found["begun"] == 3 and found["sampler"] == one_rank["sampler"]
    np.testing.assert_allclose(found["steps"], one_rank["steps"][3:], rtol=2e-4)
    assert far(found["state"], one_rank["state"]) < 1e-2
    now = f"2 ranks ({strategy})" if strategy else "1 rank"
    was = "1 rank" if source == "one" else f"2 ranks ({source})"
    assert f"so far on {was}, from here on {now}: not bit for bit" in found["said"]


def gradients(ranks: Ranks, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of the mean loss of the first four windows."""
    one = make(ranks, config)
    for name, parameter in one.model.named_parameters():
        if name.endswith(("bias", "output_scale")):  # they start at 0: nothing behind them learns
            torch.nn.init.constant_(parameter, 0.1)
    part = one.sampler.batch(4, ranks.rank, ranks.size)
    (one.loss_sum(*part) / len(part.inputs)).backward()
    return {
        name: whole(p.grad).numpy()
        for name, p in one.model.named_parameters()
        if p.grad is not None
    }


def all_gradients(ranks: Ranks, folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Of every family, without and with recomputation of activations."""
    found = {}
    for family in MODELS:
        for recompute in (False, True):
            config = configuration(folder, family, gradient_checkpointing=recompute)
            config = changed(config, f"grads-{family}", strategy="fsdp")
            found[f"{family}, {recompute=}"] = gradients(ranks, config)
    return found


def test_gradients_of_every_family_when_sharded(folder: Path) -> None:
    expected = all_gradients(Ranks(), folder)
    found, _ = world.run(2, all_gradients, folder)
    for name, wanted in expected.items():
        assert found[name].keys() == wanted.keys() and len(wanted) > 5, name
        for parameter, grad in wanted.items():
            assert np.abs(grad).sum() > 0, (name, parameter)
            np.testing.assert_allclose(
                found[name][parameter], grad, rtol=1e-3, atol=1e-4 * np.abs(grad).max()
            )


def run_and_export(ranks: Ranks, config: dict[str, Any]) -> dict[str, float]:
    return make(ranks, config).run()


def test_a_sharded_run_exports_the_whole_model(folder: Path, one_rank: dict[str, Any]) -> None:
    config = changed(configuration(folder), "exported", strategy="fsdp")
    figures, others = world.run(2, run_and_export, {**config, "export_dtype": "float32"})
    assert figures == others
    model, _ = load_model(folder / "exported" / "final", "auto")
    for name, parameter in model.named_parameters():
        trained = one_rank["state"][f"model.{name}"]
        np.testing.assert_allclose(parameter.detach(), trained, rtol=1e-2, atol=1e-4)
    assert (folder / "exported" / "final" / "training.json").is_file()


def test_torchrun_on_the_command_line(folder: Path) -> None:
    config = changed(configuration(folder), "torchrun", strategy="ddp")
    (folder / "torchrun.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, "-m", "yocolm", "train", str(folder / "torchrun.yaml"), "train.log_every=1"],
        env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=world.PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    assert ", cpu, 2 ranks (ddp)" in result.stderr
    assert result.stderr.count("| loss ") == STEPS and result.stderr.count("wrote ") == 1
    world.run(2, run_and_export, changed(configuration(folder), "by-hand", strategy="ddp"))
    weights = [folder / name / "final/model.safetensors" for name in ("torchrun", "by-hand")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def errors(ranks: Ranks, configs: list[dict[str, Any]]) -> list[str]:
    """What each configuration raises on this rank."""
    found = []
    for config in configs:
        try:
            make(ranks, config)
        except ConfigError as error:
            found.append(str(error))
        except SystemExit:
            found.append("silent")
    return found


def test_errors_end_all_ranks_and_are_said_once(folder: Path) -> None:
    config = configuration(folder)
    odd = {**config, "train": {**config["train"], "batch_size": 3, "accumulate": 1}}
    muon = {**config, "train": {**config["train"], "optimizer": "muon"}}
    missing = {**config, "data": {**config["data"], "validation": [str(folder / "absent.txt")]}}
    configs = [
        changed(odd, "errors"),
        changed(muon, "errors", strategy="fsdp"),
        changed(config, "errors", strategy="fsdp", shard_size=3),
        changed(config, "errors", shard_size=2),
        changed(missing, "errors"),
    ]
    said, other = world.run(2, errors, configs)
    assert "is 3 windows a step, which 2 ranks cannot share evenly" in said[0]
    assert "'muon', which needs whole matrices" in said[1]
    assert "parallel.shard_size is 3; it must divide the number of ranks, 2" in said[2]
    assert "parallel.strategy 'auto' shards nothing" in said[3]
    assert "no file matches" in said[4] and other == ["silent"] * 5


def given(batch_size: int, accumulate: int) -> TrainSettings:
    config = values(Path("x"), steps=1, batch_size=batch_size, accumulate=accumulate)
    return parse_settings(config)


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "size", "expected"),
    [
        (4, 1, 1, [4]),
        (2, 3, 1, [2, 2, 2]),
        (4, 1, 2, [2]),
        (4, 1, 4, [1]),
        (4, 2, 2, [4]),
        (4, 3, 2, [3, 3]),
        (4, 5, 2, [4, 3, 3]),
        (1, 8, 4, [1, 1]),
    ],
)
def test_how_ranks_share_a_step(
    batch_size: int, accumulate: int, size: int, expected: list[int]
) -> None:
    sizes = micro_batches(given(batch_size, accumulate), Ranks(0, size))
    assert sizes == expected and max(sizes) <= batch_size


def test_windows_of_ranks_are_those_of_one(folder: Path) -> None:
    """A step's windows, in the order of micro-batches and ranks, are the next of the one order."""
    config = values(folder, steps=1, batch_size=2, accumulate=6)
    config["output_dir"] = str(folder / "windows")
    one = Trainer(parse_settings(config))
    expected = one.sampler.batch(12).inputs
    for size in (2, 3, 4, 6):
        samplers = [Trainer(parse_settings(config)).sampler for _ in range(size)]
        sizes = micro_batches(one.s, Ranks(0, size))
        parts = [
            sampler.batch(n * size, rank, size).inputs
            for n in sizes
            for rank, sampler in enumerate(samplers)
        ]
        assert np.array_equal(np.concatenate(parts), expected)


def test_one_process_needs_no_ranks(tmp_path: Path) -> None:
    """A configuration for a cluster runs on a laptop."""
    plain = trainer(tmp_path)
    config = {**values(tmp_path), "parallel": {"strategy": "fsdp", "shard_size": 8}}
    assert strategy_of(parse_settings(config), Ranks()) == "single"
    assert plain.train_step() == Trainer(parse_settings(config)).train_step()


def interrupted(ranks: Ranks, config: dict[str, Any]) -> tuple[int, str]:
    """A run in which rank 1 alone is told to stop, in its second step."""
    one = make(ranks, config)
    loss_sum = one.loss_sum

    def loss(*given: Any) -> torch.Tensor:
        if one.step == 1 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss_sum(*given)

    one.loss_sum = loss  # type: ignore[method-assign]
    try:
        one.run()
    except KeyboardInterrupt:
        return one.step, "stopped"
    return one.step, "ran to the end"


def test_a_signal_to_one_rank_stops_all(folder: Path) -> None:
    config = changed(configuration(folder, save_every=100), "stopped", strategy="fsdp")
    assert world.run(2, interrupted, config) == [(2, "stopped")] * 2
    assert [path.name for path in (folder / "stopped").glob("step-*")] == ["step-0000002"]
