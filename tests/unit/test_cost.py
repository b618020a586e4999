"""Predicted seconds: loads against the formulas, monotony, and what is learned from steps."""

import math
import random
from dataclasses import replace

import pytest

from yocolm.config import ModelConfig
from yocolm.engine.cost import CostModel, StepCost, StepLoad
from yocolm.engine.cost_parts import BUCKETS, Mixing, Table
from yocolm.engine.hardware import Hardware, fingerprint
from yocolm.models.presets import preset
from yocolm.models.spec import RETENTION_CHUNK, model_spec

EPYC = Hardware.load("epyc-2core")
MODELS = ("160M", "llama-160M", "gemma-3n-E2B", "gemma-4-E2B", "gemma-4-26B-A4B")


def cost_model(name: str = "160M", hardware: Hardware = EPYC, **options: bool) -> CostModel:
    return CostModel(model_spec(preset(name)), 2, hardware, **options)


def load_of(cost: CostModel, *entries: tuple[int, ...]) -> StepLoad:
    load = StepLoad()
    for entry in entries:
        cost.add(load, *entry)
    return load


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("context", [1, 100, 511, 512, 513, 5000])
def test_a_decode_reads_what_its_layers_read(name: str, context: int) -> None:
    config: ModelConfig = preset(name)
    spec = model_spec(config)
    load = load_of(cost_model(name), (context - 1, 1, 1, 1))
    windows = globals_ = states = 0
    for store in spec.stores:
        per_token = store.num_heads * (store.k_dim + store.v_dim) * 2
        if store.kind == "global_kv":
            globals_ += store.readers * per_token * context
        elif store.kind == "window_kv":
            windows += store.readers * per_token * min(context, store.window)
        else:
            states += 2 * store.bytes_per_slot(2)
    assert load.kv_bytes_write + load.kv_bytes_read == globals_
    assert (load.window_bytes, load.state_bytes) == (windows, states)
    assert (load.tokens, load.rows, load.sequences, load.draws, load.logits) == (1,) * 5
    assert load.write_flops == load.read_flops == load.chunks == 0
    half_of = {"160M": 0, "llama-160M": 11 / 12}
    if name in half_of:
        assert load.kv_bytes_write == half_of[name] * globals_


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("start", "stop"), [(0, 2), (0, 300), (100, 1124), (1000, 1100)])
def test_chunks_count_the_flops_of_the_formulas(name: str, start: int, stop: int) -> None:
    spec, cost = model_spec(preset(name)), cost_model(name)
    load = load_of(cost, (start, stop - start, 0))
    chunk = min(RETENTION_CHUNK, stop - start)
    assert load.write_flops == sum(m.span_flops(start, stop, chunk) for m in spec.write_mixers)
    assert (load.rows, load.read_flops, load.kv_bytes_read, load.logits) == (0, 0, 0, 0)
    scored = load_of(cost, (start, stop - start, 2, 1))
    rows = (stop - 1, stop)
    assert scored.read_flops == sum(spec.read_attention_flops(context) for context in rows)
    assert Mixing(spec.read_mixers).flops(0, 5) == sum(
        spec.read_attention_flops(context) for context in range(1, 6)
    )


def test_a_row_of_a_chunk_scans_like_a_decode() -> None:
    cost = cost_model()
    chunk, decode = load_of(cost, (100, 50, 1, 1)), load_of(cost, (149, 1, 1, 1))
    assert chunk.kv_bytes_read == decode.kv_bytes_read > 0 == chunk.read_flops


def test_without_fast_prefill_all_rows_are_read() -> None:
    off = load_of(cost_model(fast_prefill=False), (0, 512, 1, 1))
    on = load_of(cost_model(), (0, 512, 1, 1))
    assert (off.rows, on.rows, off.logits, on.logits) == (512, 1, 1, 1)
    assert off.read_flops > 0 == on.read_flops
    assert cost_model().seconds(off) > 1.5 * cost_model().seconds(on)


def test_samples_of_one_row() -> None:
    load = load_of(cost_model(), (0, 10, 1, 3))
    assert (load.rows, load.logits, load.draws) == (1, 3, 3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hardware", ["epyc-2core", "h100"])
def test_more_takes_longer(name: str, hardware: str) -> None:
    cost = cost_model(name, Hardware.load(hardware))
    rng = random.Random(0)
    for corrections in ([0.0, 0.0, 0.0], [0.6, -0.3, 0.1], [-0.6, 0.3, -0.2]):
        cost.corrections = corrections
        for _ in range(50):
            decodes = [(rng.randrange(1, 20_000), 1, 1, 1) for _ in range(rng.randrange(20))]
            start = rng.choice([0, 64, 4096])
            sizes = [*range(2, 20), *range(20, 5000, 97)]
            loads = [load_of(cost, *decodes, (start, size, 0)) for size in sizes]
            seconds = [cost.seconds(load) for load in loads]
            assert seconds == sorted(seconds)
        stops = range(1, 9000, 61)
        prefills = [cost.prefill_seconds(0, stop) for stop in stops]
        assert prefills == sorted(prefills) and prefills[0] > 0
    assert cost.prefill_seconds(10, 10) == 0
    contexts = [cost.decode_seconds(context) for context in (1, 100, 10_000, 100_000)]
    assert contexts == sorted(contexts) and contexts[0] > 0


def test_phases_sum_to_the_whole() -> None:
    cost = cost_model("gemma-4-E2B")
    cost.corrections = [0.3, -0.2, 0.1]
    for entries in ([(0, 700, 0)], [(5000, 1, 1, 1), (3, 1, 1, 1), (0, 64, 1, 1)], []):
        load = load_of(cost, *entries)
        assert cost.predict(load).total == pytest.approx(cost.seconds(load))
    inside = cost.predict(load_of(cost, (0, 700, 0)))
    assert inside.cross_decode == inside.sample == 0 < inside.self_prefill


def test_rates_show_in_the_seconds() -> None:
    """A 160M step is what the bytes and FLOPs at the file's rates say, within its overheads."""
    bare = replace(
        EPYC,
        layer_seconds=0,
        mixing_seconds=0,
        step_seconds=0,
        sequence_seconds=0,
        chunk_seconds=0,
    )
    spec, cost = model_spec(preset("160M")), cost_model(hardware=bare)
    one = cost.predict(load_of(cost, (0, 1, 1, 1)))
    state = 2 * spec.slot_bytes(2) / bare.state_bandwidth
    expected = spec.write_params * 2 / bare.weight_bandwidth + state
    assert one.self_prefill == pytest.approx(expected, rel=0.01)
    many = cost.predict(load_of(cost, (0, 2048, 0)))
    flops = 2048 * spec.write_flops_per_token / bare.matrix_rate(2048)
    mixing = (spec.write_flops(0, 2048) - 2048 * spec.write_flops_per_token) / bare.attention_rate
    assert many.self_prefill == pytest.approx(flops + mixing + state, rel=0.01)
    logits = cost.predict(load_of(cost, (0, 64, 64, 0))).sample
    rate = bare.matrix_rate(64) / bare.logits_factor
    assert logits == pytest.approx(64 * spec.logits_flops_per_row / rate)
    near, far = (cost.predict(load_of(cost, (c, 1, 1, 1))) for c in (1000, 101_000))
    scan = 100_000 * spec.scan_bytes(2)[1] / bare.kv_bandwidth
    assert far.cross_decode - near.cross_decode == pytest.approx(scan)


def test_tables_of_the_model_are_taken() -> None:
    spec = model_spec(preset("160M"))
    table = tuple((tokens, 1.0 + tokens) for tokens in BUCKETS)
    mine = replace(
        EPYC,
        model=fingerprint(spec, 2),
        write_table=table,
        read_table=table,
        logits_table=table,
    )
    cost = cost_model(hardware=mine)
    assert cost.predict(load_of(cost, (0, 3, 0))).self_prefill == pytest.approx(4.0, abs=0.1)
    assert cost_model("llama-160M", mine).seconds(load_of(cost, (0, 3, 0))) < 1


def test_another_machine_is_adopted_whole() -> None:
    cost, h100 = cost_model(), Hardware.load("h100")
    load = load_of(cost, (0, 3, 0))
    for _ in range(10):
        cost.observe(load, StepCost(1.0))
    cost.adopt(h100)
    assert cost.hardware is h100
    assert cost.predict(load) == cost_model(hardware=h100).predict(load)


def test_solo_figures_and_swaps() -> None:
    cost = cost_model()
    short, long = cost.solo_ttft(100), cost.solo_ttft(8192)
    assert long == pytest.approx(cost.prefill_seconds(0, 8192), rel=0.05) and long > 20 * short
    assert cost.solo_ttft(8192, budget=512) > long
    assert cost.solo_tpot(100_000) > 1.5 * cost.solo_tpot(100)
    before = cost.solo_tpot(100)
    cost.corrections = [0.5, 0.5, 0.5]
    assert cost.solo_tpot(100) == before  # a machine that is slow for a while is no standard
    rate = EPYC.swap_bandwidth
    assert cost.swap_seconds(2 * rate) - cost.swap_seconds(rate) == pytest.approx(1)


def scaled(cost: StepCost, memory: float, rest: float, noise: float = 1.0) -> StepCost:
    return StepCost(
        cost.self_prefill * memory * noise,
        cost.kv_finalize * memory * noise,
        cost.cross_decode * memory * noise,
        cost.sample * memory * noise,
        cost.overhead * rest * noise,
    )


def test_a_machine_whose_memory_slows_is_followed_in_a_few_steps() -> None:
    truth, cost = cost_model(), cost_model()
    load = load_of(cost, *[(500, 1, 1, 1)] * 4)
    for _ in range(50):
        cost.observe(load, truth.predict(load))
    assert cost.seconds(load) == pytest.approx(truth.seconds(load), rel=0.01)
    slow = scaled(truth.predict(load), 1.7, 1.0)
    for _ in range(6):
        cost.observe(load, slow)
    assert cost.seconds(load) == pytest.approx(slow.total, rel=0.1)
    chunk = load_of(cost, (0, 1024, 0))
    assert cost.seconds(chunk) < 1.15 * truth.seconds(chunk)  # arithmetic is as fast as before


def test_one_step_that_was_interrupted_changes_little() -> None:
    truth, cost = cost_model(), cost_model()
    load = load_of(cost, *[(500, 1, 1, 1)] * 4)
    for _ in range(20):
        cost.observe(load, truth.predict(load))
    before = cost.seconds(load)
    cost.observe(load, scaled(truth.predict(load), 30.0, 30.0))
    assert cost.seconds(load) == pytest.approx(before, rel=0.08)
    for _ in range(3):
        cost.observe(load, truth.predict(load))
    assert cost.seconds(load) == pytest.approx(before, rel=0.05)


def test_what_is_wrong_for_long_is_learned() -> None:
    """From generic figures, on a machine that is different in every part."""
    real = replace(
        EPYC,
        weight_bandwidth=30e9,
        kv_bandwidth=20e9,
        state_bandwidth=80e9,
        attention_rate=200e9,
        step_seconds=4e-4,
        draw_seconds=6e-5,
        matrix_rates=((1, 60e9), (16, 200e9), (2048, 300e9)),
    )
    truth, cost, rng = cost_model(hardware=real), cost_model(), random.Random(1)

    def step() -> StepLoad:
        decodes = [(rng.randrange(50, 8000), 1, 1, 1) for _ in range(rng.randrange(1, 17))]
        chunk = [(rng.randrange(0, 4096, 64), rng.randrange(64, 1024), rng.randrange(2), 0)]
        return load_of(cost, *decodes, *(chunk if rng.random() < 0.4 else []))

    def error() -> float:
        loads = [step() for _ in range(100)]
        return sum(abs(cost.seconds(x) / truth.seconds(x) - 1) for x in loads) / len(loads)

    assert error() > 0.2
    for _ in range(400):
        load = step()
        cost.observe(load, scaled(truth.predict(load), 1, 1, math.exp(rng.gauss(0, 0.05))))
    assert error() < 0.05
    learned = CostModel(cost.spec, 2, cost.refined())
    loads = [step() for _ in range(50)]
    assert sum(abs(learned.seconds(x) / truth.seconds(x) - 1) for x in loads) / 50 < 0.15


def test_what_cannot_be_is_not_learned() -> None:
    cost = cost_model()
    load = load_of(cost, (500, 1, 1, 1))
    before = cost.seconds(load)
    for actual in (StepCost(), StepCost(math.nan), StepCost(math.inf), StepCost(-1.0)):
        cost.observe(load, actual)
    cost.observe(StepLoad(), StepCost(1.0, 1.0, 1.0, 1.0, 1.0))
    assert cost.seconds(load) == before
    for _ in range(1000):
        cost.observe(load, StepCost(1e3, 1e3, 1e3, 1e3, 1e3))
    assert math.isfinite(cost.seconds(load)) and cost.seconds(load) < 200 * before


def test_copies_learn_apart() -> None:
    cost = cost_model()
    load = load_of(cost, (500, 1, 1, 1))
    before, other = cost.seconds(load), cost.copy()
    for _ in range(10):
        other.observe(load, scaled(cost.predict(load), 2.0, 2.0))
    assert cost.seconds(load) == before < 1.5 * before < other.seconds(load)


def test_on_a_gpu_only_the_whole_is_known() -> None:
    """Kernels run behind the host's clock: their time shows where it waits."""
    cost = cost_model(hardware=Hardware.load("h100"))
    load = load_of(cost, *[(500, 1, 1, 1)] * 4)
    whole = 2 * cost.seconds(load)
    for _ in range(30):
        cost.observe(load, StepCost(sample=whole))
    assert cost.seconds(load) == pytest.approx(whole, rel=0.05)


def test_tables_ascend_and_go_on() -> None:
    table = Table(((1, 2.0), (4, 1.0), (8, 10.0)))
    assert [sum(table.at(n)) for n in (0, 1, 4, 6, 8, 12)] == [1.0, 1.0, 1.0, 5.5, 10.0, 19.0]
    assert table.at(12) == (10.0, 9.0) and Table(((1, 3.0),)).at(5) == (3.0, 0.0)
    for _ in range(100):
        table.scale(4, 0.5)
    values = [seconds for _, seconds in table.curve]
    assert values == sorted(values) and values[1] == 10.0
