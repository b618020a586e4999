"""Loss by position against one dense forward pass, at every cut into chunks."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tiny import (
    FAMILIES,
    ONE_OF_EACH,
    VOCAB,
    packed_logits,
    prompt_of,
    served_model,
    tiny_model,
)
from tolerances import CROSS_PATH
from yocolm import cli
from yocolm.errors import ConfigError, NumericsError, RequestError
from yocolm.eval import nll as module
from yocolm.eval.corpus import load_document
from yocolm.eval.nll import LongScorer, Scored, cumulative, nll, nll_report, position_table
from yocolm.eval.report_html import page
from yocolm.models.registry import load_tokenizer

TOKENS = 150


def dense_losses(name: str, dtype: str, tokens: list[int]) -> torch.Tensor:
    logits = packed_logits(tiny_model(name, dtype), [tokens[:-1]])
    wide = torch.float64 if dtype == "float64" else torch.float32
    return F.cross_entropy(logits.to(wide), torch.tensor(tokens[1:]), reduction="none").double()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_losses_are_those_of_the_dense_forward_pass(name: str, dtype: str) -> None:
    tokens = prompt_of(TOKENS + 1)
    wanted = dense_losses(name, dtype, tokens)
    for chunk in (1, 7, 64, TOKENS - 1, TOKENS, 1000):
        if chunk == 1 and dtype == "float32":
            continue
        scorer = LongScorer(served_model(name, dtype), FAMILIES[name], TOKENS, chunk)
        positions, losses = scorer.score(torch.tensor(tokens))
        assert positions.tolist() == list(range(TOKENS))
        tolerance = 1e-4 if dtype == "float32" else 1e-5  # losses are computed in float32
        assert (losses - wanted).abs().max() <= max(tolerance, CROSS_PATH[dtype]), chunk


@pytest.mark.parametrize("name", ["retention", "llama", "gemma3n"])
def test_a_share_of_the_rows_has_the_losses_it_has_among_all(name: str) -> None:
    tokens = torch.tensor(prompt_of(TOKENS + 1))
    model, config = served_model(name), FAMILIES[name]
    _, every = LongScorer(model, config, TOKENS, 32).score(tokens)
    scorer = LongScorer(model, config, TOKENS, 32)
    positions, losses = scorer.score(tokens, share=0.25, seed=5)
    # 8 of each whole chunk of 32, side by side, and a quarter of the last 22.
    assert len(positions) == 4 * 8 + round(22 / 4)
    assert all(p // 32 == i // 8 for i, p in enumerate(positions.tolist()))
    assert torch.allclose(losses, every[positions], atol=1e-4)
    again, _ = scorer.score(tokens, share=0.25, seed=5)
    other, _ = scorer.score(tokens, share=0.25, seed=6)
    assert again.tolist() == positions.tolist() != other.tolist()


def test_the_share_is_that_of_all_rows_however_they_are_cut() -> None:
    tokens = torch.tensor(prompt_of(TOKENS + 1))
    scorer = LongScorer(served_model("llama"), FAMILIES["llama"], TOKENS, 10)
    for share, count in ((0.1, 15), (0.15, 22), (0.25, 38), (0.99, 148)):
        assert len(scorer.score(tokens, share=share)[0]) == pytest.approx(count, abs=1)
    with pytest.raises(RequestError, match="share of 0.05 of 10 tokens is less than one"):
        scorer.score(tokens, share=0.05)


def test_a_scorer_starts_from_nothing_each_time() -> None:
    scorer = LongScorer(served_model("retention"), FAMILIES["retention"], TOKENS, 16)
    tokens = torch.tensor(prompt_of(TOKENS + 1))
    first = scorer.score(tokens)[1]
    scorer.score(torch.tensor(prompt_of(99, seed=3)))
    assert torch.equal(scorer.score(tokens)[1], first)


def watched(model: Any, seen: dict[str, list[int]]) -> Any:
    """The model, noting how many rows the first argument of each method has."""

    def method(name: str) -> Any:
        def call(x: torch.Tensor, *more: Any) -> Any:
            seen[name].append(len(x))
            return getattr(model, name)(x, *more)

        return call

    return SimpleNamespace(embed=model.embed, **{name: method(name) for name in seen})


def test_memory_is_that_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is never given more tokens than a chunk has, nor the head more rows than it may."""
    monkeypatch.setattr(module, "_LOGITS", 10 * VOCAB)
    seen: dict[str, list[int]] = {"write": [], "read": [], "logits": []}
    scorer = LongScorer(tiny_model("retention"), FAMILIES["retention"], TOKENS, 32)
    scorer.model = watched(scorer.model, seen)
    scorer.score(torch.tensor(prompt_of(TOKENS + 1)))
    assert seen["write"] == seen["read"] == [32, 32, 32, 32, 22]
    assert max(seen["logits"]) == 10 and sum(seen["logits"]) == TOKENS
    seen["read"].clear()
    scorer.score(torch.tensor(prompt_of(TOKENS + 1)), share=0.5)
    assert seen["read"] == [16, 16, 16, 16, 11]


def test_losses_that_are_not_finite_are_named() -> None:
    model = served_model("llama")
    scorer = LongScorer(model, FAMILIES["llama"], 20, 8)
    broken: Any = watched(model, {"write": [], "read": []})
    broken.logits = lambda rows: torch.full((len(rows), VOCAB), math.nan)
    scorer.model = broken
    with pytest.raises(NumericsError, match="at token 1:.*not finite"):
        scorer.score(torch.tensor(prompt_of(21)))


def test_a_state_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="state of 5000 tokens takes .* 1000 are free"):
        LongScorer(served_model("llama"), FAMILIES["llama"], 5000)


def scored(losses: list[float], positions: list[int] | None = None, tokens: int = 0) -> Scored:
    where = torch.tensor(list(range(len(losses))) if positions is None else positions)
    values = torch.tensor(losses, dtype=torch.float64)
    return Scored("one", tokens or len(losses), where, values, torch.full_like(values, 2.0))


def test_the_table_by_position() -> None:
    losses = [1.0] * 64 + [2.0] * 64 + [4.0] * 10
    rows = position_table([scored(losses), scored([3.0] * 70)])
    assert [(row["from"], row["to"]) for row in rows] == [(0, 64), (64, 128), (128, 138)]
    assert [row["documents"] for row in rows] == [2, 2, 1]
    assert [row["tokens"] for row in rows] == [128, 70, 10]
    assert rows[0]["nll_per_token"] == pytest.approx(2.0)
    assert rows[0]["standard_error"] == pytest.approx(128**-0.5 * (128 / 127) ** 0.5)
    assert rows[1]["nll_per_token"] == pytest.approx((64 * 2 + 6 * 3) / 70)
    assert rows[2]["bits_per_byte"] == pytest.approx(4 / math.log(2) / 2)
    assert rows[2]["cumulative_nll"] == pytest.approx((sum(losses) + 210) / 208)


def test_the_cumulative_curve_is_of_what_was_scored_so_far() -> None:
    points = cumulative(scored([1.0, 5.0, 6.0], [10, 70, 200], tokens=256))
    assert points[0] == (64.0, 1.0)
    assert points[-1] == (256.0, 4.0)
    assert dict(points)[128.0] == 3.0
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_documents_of_different_lengths_are_pointed_out() -> None:
    report = nll_report("m", [scored([1.0] * 100), scored([1.0] * 200)], {}, {})
    assert "different lengths, 100 to 200" in report.notes[0]


def test_a_terminal_is_shown_text_as_it_is_and_a_page_escaped() -> None:
    settings = {"glob": ("<a>", "b&c"), "more": {"<d>": 1}}
    report = replace(
        nll_report("m", [scored([1.0] * 9)], settings, {}), cells=[{"name": "<x> & y"}]
    )
    assert "<x> & y" in report.text()
    shown = page(report)
    assert "<td>&lt;x&gt; &amp; y</td>" in shown and "&lt;a&gt;, b&amp;c</td>" in shown
    assert "&lt;d&gt;: 1</td>" in shown


def test_a_folder_is_one_document(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bundled")
    assert tokenizer is not None
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.c").write_text("int two;\n")
    (tmp_path / "a.c").write_text("int one;\n")
    (tmp_path / "c.txt").write_text("three\n")
    (tmp_path / ".hidden").write_text("no\n")
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")

    def text(**options: object) -> str:
        document = load_document(tmp_path, tokenizer, 1000, **options)  # type: ignore[arg-type]
        assert sum(document.text.token_bytes) == document.text.num_bytes
        return tokenizer.decode(document.text.token_ids)

    one, two = "==> a.c <==\nint one;\n", "==> b/two.c <==\nint two;\n"
    assert text() == f"{one}\n{two}\n==> c.txt <==\nthree\n"
    assert text(globs=["*.c"]) == f"{one}\n{two}"
    assert text(globs=["*.c"], header="// {path}") == "// a.c\nint one;\n\n// b/two.c\nint two;\n"
    orders = {text(globs=["*.c"], shuffle=seed) for seed in range(8)}
    assert orders == {f"{one}\n{two}", f"{two}\n{one}"}
    assert text(shuffle=3) == text(shuffle=3)
    with pytest.raises(RequestError, match="not UTF-8"):
        text(globs=["pic*"])
    with pytest.raises(RequestError, match=r"holds no text in '\*.h', '\*.x'"):
        text(globs=["*.h", "*.x"])
    for glob in ("/*.c", "a**.c"):
        with pytest.raises(RequestError, match="does not name files within"):
            text(globs=[glob])
    with pytest.raises(RequestError, match="holds no text"):
        text(globs=[""])
    with pytest.raises(RequestError, match="neither a file nor a folder"):
        load_document(tmp_path / "none", tokenizer, 10)


def test_files_are_read_as_far_as_they_are_needed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bundled")
    assert tokenizer is not None
    for name in "abc":
        (tmp_path / name).write_text("word " * 100)
    document = load_document(tmp_path, tokenizer, 150)
    assert document.files == 2 and len(document.text.token_ids) == 150


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 12)
    command = ["eval", "nll", "bundled", str(text), "--length", "100", "--chunk", "32", "--json"]
    assert cli.main([*command, "--output", str(tmp_path / "out")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "report.json").read_text())
    whole = nll("bundled", [text], length=100, chunk=100)
    assert printed["summary"]["nll_per_token"] == pytest.approx(whole.summary["nll_per_token"])
    assert printed["summary"]["tokens_scored"] == 100
    assert printed["settings"]["first_token"] == "predicted from BOS"
    with pytest.raises(RequestError, match="paths have .*text.txt twice"):
        nll("bundled", [text, text])
    # What repeats is predicted better and better.
    assert printed["cells"][1]["nll_per_token"] < printed["cells"][0]["nll_per_token"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('<path class="line c1"') == 2 and "src=" not in page and "<script" not in page
    assert cli.main(["eval", "nll", "bundled", str(text), "--share", "0"]) == 1
    assert "share is 0.0; it must be above 0" in capsys.readouterr().err
