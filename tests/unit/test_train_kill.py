"""Two ranks that are killed (-9), between and during checkpoints, and go on bit for bit."""

import os
import pkgutil
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ranks as world
from ranks import changed, make
from training import values, write_texts
from yocolm.train.checkpoint import latest, load_tensors, read_values, training_tensors
from yocolm.train.distributed import Ranks, whole
from yocolm.train.trainer import Trainer

# Who dies, in which call of what, and whether the checkpoint counted by then.
MOMENTS = [
    (1, "torch.save", 0, False),  # with a part of its tensors written
    (0, "torch.save", 2, False),
    (1, "yocolm.train.checkpoint.save", 0, False),  # before it writes any, while the other saves
    (0, "os.fsync", 0, False),
    (0, "pickle.dump", 0, False),  # with half of the index written
    (0, "pathlib.Path.rename", 0, False),  # of the index
    (0, "json.dumps", 1, False),  # all ranks are done, the plain values are missing
    (0, "pathlib.Path.rename", 1, False),  # of the folder: nothing is missing but its name
    (0, "pathlib.Path.rename", 2, True),  # of an old checkpoint, to be removed
    (0, "shutil.rmtree", 0, True),
]


def configuration(folder: Path, output: str, strategy: str, steps: int) -> dict[str, Any]:
    config = values(folder, steps=steps, save_every=1, keep=2)
    return changed(config, output, strategy=strategy)


def state_of(one: Trainer) -> dict[str, np.ndarray]:
    tensors = training_tensors(one.model, one.optimizers)
    return {name: whole(tensor).clone().numpy() for name, tensor in tensors.items()}


def on_to(ranks: Ranks, config: dict[str, Any], stop: int) -> tuple[int, dict[str, np.ndarray]]:
    """Steps and checkpoints up to ``stop``: where they began, and the state they end in."""
    one = make(ranks, config)
    begun = one.step
    while one.step < stop:
        one.train_step()
        one.save()
    return begun, state_of(one)


def die(ranks: Ranks, config: dict[str, Any], victim: int, moment: str, call: int) -> None:
    """One step with a whole checkpoint, and one in whose checkpoint a rank dies."""
    one = make(ranks, config)
    one.train_step()
    one.save()
    one.train_step()
    if ranks.rank == victim:
        calls = iter(range(call))
        original = pkgutil.resolve_name(moment)

        def killed(*given: Any, **options: Any) -> Any:
            if next(calls, None) is not None:
                return original(*given, **options)
            for file in given:
                if hasattr(file, "write"):
                    file.write(b"half of it")
                    file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch(moment, killed):
            one.save()
    one.save()


def newest_step(folder: Path) -> int:
    path = latest(folder)
    return 0 if path is None else int(path.name.removeprefix("step-"))


def check_newest(folder: Path) -> int:
    """The newest checkpoint can be read whole; its step."""
    path = latest(folder)
    assert path is not None
    config = values(folder.parent)
    one = make(Ranks(), {**config, "output_dir": str(folder.parent / "other")})
    load_tensors(path, training_tensors(one.model, one.optimizers), Ranks())
    return read_values(path)["step"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("killed")
    write_texts(path)
    return path


def test_a_torn_checkpoint_is_never_picked_up(folder: Path) -> None:
    """The same training dies in one checkpoint after another, in all that there is to do in one."""
    steps = 1 + len(MOMENTS) + sum(committed for *_, committed in MOMENTS)
    whole_run = configuration(folder, "whole", "fsdp", steps)
    expected = [state for _, state in world.run(2, on_to, whole_run, steps)]
    config = configuration(folder, "torn", "fsdp", steps)
    output, newest = Path(config["output_dir"]), 0
    for victim, moment, call, committed in MOMENTS:
        dying = world.World(2, die, config, victim, moment, call)
        codes = dying.join()
        where = f"rank {victim} in call {call} of {moment}"
        assert codes[victim] == -signal.SIGKILL, where
        assert codes[1 - victim] not in (0, None), f"{where}: the other one thinks all is well"
        newest += 1 + committed
        assert check_newest(output) == newest, where
    found = world.run(2, on_to, config, steps)
    for (begun, state), wanted in zip(found, expected, strict=True):
        assert begun == newest < steps
        assert state.keys() == wanted.keys()
        assert all(np.array_equal(state[name], wanted[name]) for name in wanted)
    names = sorted(path.name for path in output.iterdir() if "step" in path.name)
    assert names == [f"step-{n:07d}" for n in (steps - 1, steps)], "what was left is cleared away"


def run(ranks: Ranks, config: dict[str, Any]) -> dict[str, float]:
    return make(ranks, config).run()


def test_killed_at_any_time_it_ends_the_same(folder: Path) -> None:
    steps = 12
    expected, _ = world.run(2, run, configuration(folder, "uncut", "ddp", steps))
    config = configuration(folder, "cut", "ddp", steps)
    output, rng, done = Path(config["output_dir"]), random.Random(0), 0
    for _ in range(3):
        cut = world.World(2, run, config)
        while newest_step(output) <= done:
            assert all(process.is_alive() for process in cut.processes)
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.1))
        cut.kill()
        done = check_newest(output)
        if done > steps - 3:
            break
    found, other = world.run(2, run, config)
    assert found == other == expected
    weights = [folder / name / "final" / "model.safetensors" for name in ("uncut", "cut")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
