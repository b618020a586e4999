"""What one GPU holds and serves: numbers that can be had otherwise, and the table."""

import pytest

from yocolm.bench.capacity import OUTPUT, capacity, main, markdown
from yocolm.bench.simulated import Setup
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings
from yocolm.errors import ConfigError
from yocolm.models.presets import preset
from yocolm.models.spec import model_spec


def test_what_is_held_is_memory_over_footprint() -> None:
    config, hardware = preset("3B"), Hardware.load("h100")
    spec = model_spec(config)
    found = capacity(Setup(config, hardware, EngineSettings()), 131_072)
    left = 0.9 * hardware.memory_bytes - spec.weight_bytes(2)
    assert found.request_bytes == spec.bytes(131_072, 64, 2)
    assert found.held == int(left // found.request_bytes)
    assert found.ttft == pytest.approx(
        Setup(config, hardware, EngineSettings()).cost().solo_ttft(131_072 - OUTPUT)
    )
    # As many as are held prefill one after another, and decode together.
    assert 0.5 / found.ttft < found.serve_rate < 1 / found.ttft
    assert found.decode_rate > 1 / found.tpot


def test_where_nothing_fits_nothing_is_served() -> None:
    found = capacity(Setup(preset("llama-3B"), Hardware.load("h100"), EngineSettings()), 1 << 20)
    assert (found.held, found.decode_rate, found.serve_rate) == (0, 0.0, 0.0)
    assert found.ttft > 100


def test_the_table_sets_the_twin_beside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "160M", "--hardware", "h200", "--contexts", "8192"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
    bytes_ours, bytes_twins = (
        model_spec(preset(name)).bytes(8192, 64, 2) / 1e6 for name in ("160M", "llama-160M")
    )
    assert lines[2].startswith(f"| h200, 8K | {bytes_ours:.3g} / {bytes_twins:,.0f} (")
    with pytest.raises(ConfigError, match="no Transformer twin"):
        markdown(["h100"], [8192], "llama-160M")
