"""Axes of the charts that the reports of evaluations and benches share."""

import pytest

from yocolm.eval.charts import Axis, doubling, length_text, plain_linear


@pytest.mark.parametrize(
    ("length", "text"),
    [(100, "100"), (1024, "1K"), (1536, "1536"), (32768.0, "32K"), (1 << 20, "1M"), (3 << 20, "3M")]
    + [((1 << 20) + 1024, "1025K"), (100_000, "100000")],
)
def test_a_length_is_shown_exactly(length: float, text: str) -> None:
    assert length_text(length) == text


def texts(axis: Axis) -> list[str]:
    return [text for _, text in axis.ticks]


def test_ticks_have_the_decimals_that_tell_them_apart() -> None:
    assert texts(plain_linear(0, 10)) == ["0", "2", "4", "6", "8", "10"]
    assert texts(plain_linear(3.199, 3.2091)) == ["3.200", "3.202", "3.204", "3.206", "3.208"]
    assert len(set(texts(plain_linear(5.0, 5.0)))) > 1


def test_lengths_double() -> None:
    axis = doubling(100, 1 << 20)
    assert texts(axis)[:3] == ["128", "256", "512"] and texts(axis)[-1] == "1M"
    assert [axis.place(value) for value in (100, 1 << 20)] == [0, 1]
    assert axis.place(2048) - axis.place(1024) == pytest.approx(axis.place(512) - axis.place(256))
    assert len(doubling(1, 1 << 40).ticks) <= 12
    alone = doubling(300, 300)
    assert alone.place(300) == pytest.approx(0.5) and texts(alone) == ["256", "512"]
