"""Chains of facts, and several questions over one text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oracle import MAGIC, Oracle, find
from yocolm import cli
from yocolm.errors import RequestError
from yocolm.eval.asking import Words
from yocolm.eval.chains import ChainPlan, chain_report, evaluate_chains, score_variables
from yocolm.eval.haystack import Haystack
from yocolm.eval.report_html import page
from yocolm.eval.turns import TurnPlan, evaluate_turns, first_sentence, turn_report
from yocolm.models.registry import load_tokenizer
from yocolm.tokenizer import Tokenizer

ASSIGNED = re.compile(r"VAR (\w+) = (VAR )?(\w+)\.")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer("bundled")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"It {'rained ' * (i % 9)}again." for i in range(400)))
    return path


@pytest.fixture(scope="module")
def haystack(text: Path, tokenizer: Tokenizer) -> Haystack:
    return Haystack.from_files([text], tokenizer)


def solve(shown: str) -> str:
    """Follows either kind of chain."""
    asked = re.findall(r"have the value (\d+) are VAR\Z|has the value (\d+) is VAR\Z", shown)
    if not asked:
        return find(shown)
    value = "".join(asked[-1])
    values: dict[str, str] = {}
    for _ in range(9):
        for name, is_link, what in ASSIGNED.findall(shown):
            values[name] = values.get(what, "") if is_link else what
    return " " + ", VAR ".join(name for name, its in values.items() if its == value) + "."


def chains(
    haystack: Haystack, tokenizer: Tokenizer, plan: ChainPlan, answer: Any = solve, **words: Any
) -> tuple[Oracle, list[dict[str, Any]]]:
    oracle = Oracle(tokenizer, answer)
    return oracle, evaluate_chains(oracle, tokenizer, haystack, plan, Words.make(**words))[0]


def test_chains_lead_to_their_ends(haystack: Haystack, tokenizer: Tokenizer) -> None:
    plan = ChainPlan([600], hops=[0, 1, 3], runs=2, shuffle=True)
    oracle, samples = chains(haystack, tokenizer, plan)
    assert len(samples) == 2 * 3 * 2
    assert all(sample["score"] == 1 for sample in samples)
    for ids, params in zip(oracle.prompts, oracle.params, strict=True):
        assert params.max_tokens is not None and len(ids) + params.max_tokens == 600
    for shown, sample in zip(oracle.texts, samples, strict=True):
        links = sample["hops"]
        if sample["task"] == "variables":
            assert len(ASSIGNED.findall(shown)) == 3 * (links + 1)
            assert len({name for name, _, _ in ASSIGNED.findall(shown)}) == 3 * (links + 1)
            assert len(sample["wanted"]) == links + 1
        else:
            assert len(re.findall(rf"{MAGIC} \w+ is \d+\.", shown)) == 3
            assert len(re.findall("is the same as the one for", shown)) == 3 * links


@pytest.mark.parametrize("task", ["retrieval", "variables"])
def test_numbers_in_the_text_are_no_values(tokenizer: Tokenizer, task: str) -> None:
    ids = tokenizer.encode("It rained. " * 100, add_special_tokens=False)
    taken = frozenset(str(n) for n in range(10) if n not in (3, 7))
    plan = ChainPlan([200], [task], [0], chains=2, runs=3)
    text = Haystack(ids, range(0, len(ids) - 5, 5), taken)
    oracle, _ = chains(text, tokenizer, plan, digits=1)
    facts = [re.findall(rf"(?:{MAGIC} \w+ is|VAR \w+ =) (\d)\.", shown) for shown in oracle.texts]
    assert [sorted(found) for found in facts] == [["3", "7"]] * 3


def test_one_fact_alone_does_not_answer(haystack: Haystack, tokenizer: Tokenizer) -> None:
    """The number beside the asked key, or any number, is not enough."""

    def nearest(shown: str) -> str:
        key = re.findall(rf"{MAGIC} (\w+) is\Z", shown)[0]
        found = re.search(rf"{MAGIC} {key} is (\d+)\.", shown)
        return found.group(1) if found else re.findall(rf"{MAGIC} \w+ is (\d+)\.", shown)[0]

    plan = ChainPlan([600], ["retrieval"], [0, 2], chains=8, runs=8)
    _, samples = chains(haystack, tokenizer, plan, nearest)
    right = {hops: sum(s["score"] for s in samples if s["hops"] == hops) for hops in (0, 2)}
    assert right[0] == 8 and right[2] <= 4


@pytest.mark.parametrize("shuffle", [False, True])
def test_links_follow_each_other_unless_shuffled(
    haystack: Haystack, tokenizer: Tokenizer, shuffle: bool
) -> None:
    plan = ChainPlan([600], ["variables"], [4], shuffle=shuffle, runs=4)
    oracle, samples = chains(haystack, tokenizer, plan)
    in_order = []
    for shown, sample in zip(oracle.texts, samples, strict=True):
        places = [shown.index(f"VAR {name} =") for name in sample["wanted"]]
        in_order.append(places == sorted(places))
    assert all(in_order) != shuffle


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" AAAAA, VAR BBBBB and VAR CCCCC", 1),
        (" CCCCC AAAAA AAAAA BBBBB DDDDD", 1),
        (" DDDDD, VAR AAAAA, VAR BBBBB, VAR CCCCC", 2 / 3),
        (" AAAAA.", 1 / 3),
        (" AAAAAB, aaaaa", 0),
    ],
)
def test_the_first_variables_count(answer: str, score: float) -> None:
    assert score_variables(answer, ["AAAAA", "BBBBB", "CCCCC"]) == pytest.approx(score)


def test_the_report_of_chains(haystack: Haystack, tokenizer: Tokenizer) -> None:
    def only_needles(shown: str) -> str:
        return solve(shown) if "the same as" not in shown and "= VAR" not in shown else "?"

    words, plan = Words.make(), ChainPlan([400, 600], hops=[0, 1], runs=2)
    oracle = Oracle(tokenizer, only_needles)
    done = evaluate_chains(oracle, tokenizer, haystack, plan, words)
    report = chain_report("m", plan, words, *done)
    assert [grid.values for grid in report.grids] == [[[1, 1], [0, 0]]] * 2
    assert report.cells[0]["all_right"] == 1 and report.cells[2]["score"] == 0
    assert report.summary["score"] == 0.5
    assert '<td class="text">retrieval, variables</td>' in page(report)


def test_a_map_for_each_task(haystack: Haystack, tokenizer: Tokenizer) -> None:
    oracle = Oracle(tokenizer, lambda shown: solve(shown) if "VAR" in shown else "?")
    words, plan = Words.make(), ChainPlan([400, 600], hops=[0, 1], runs=1)
    retrieval, variables = chain_report(
        "m", plan, words, *evaluate_chains(oracle, tokenizer, haystack, plan, words)
    ).grids
    assert retrieval.values == [[0, 0], [0, 0]] and variables.values == [[1, 1], [1, 1]]


def test_bad_chains_are_refused(haystack: Haystack, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="task 'x' is unknown; give one of retrieval"):
        ChainPlan([100], ["x"])
    with pytest.raises(RequestError, match="hops have 1 twice"):
        ChainPlan([100], hops=[1, 0, 1])
    with pytest.raises(RequestError, match="lengths have 100 twice"):
        TurnPlan([100, 100])
    with pytest.raises(RequestError, match="hops are .* at least 0"):
        ChainPlan([100], hops=[-1])
    with pytest.raises(RequestError, match="123 different keys are needed and there are 120"):
        chains(haystack, tokenizer, ChainPlan([9000], ["retrieval"], [40]))
    with pytest.raises(RequestError, match="link 'x' must have {key} and {other}"):
        Words.make(link="x")


def turns(
    haystack: Haystack, tokenizer: Tokenizer, plan: TurnPlan, answer: Any = find, **words: Any
) -> tuple[Oracle, list[dict[str, Any]]]:
    oracle = Oracle(tokenizer, answer)
    return oracle, evaluate_turns(oracle, tokenizer, haystack, plan, Words.make(**words))[0]


@pytest.mark.parametrize("true_answers", [False, True])
def test_what_was_said_stays_in_the_context(
    haystack: Haystack, tokenizer: Tokenizer, true_answers: bool
) -> None:
    def wrong_at_first(shown: str) -> str:
        asked = shown.count("What is the special")
        return " 1000000. And so on" if asked == 1 else f" {find(shown)}. And so on"

    plan = TurnPlan([800], turns=3, runs=2, true_answers=true_answers)
    oracle, samples = turns(haystack, tokenizer, plan, wrong_at_first)
    assert [sample["score"] for sample in samples] == [0, 0, 1, 1, 1, 1]
    assert [sample["turn"] for sample in samples] == [1, 1, 2, 2, 3, 3]
    first, last = oracle.texts[0], oracle.texts[4]
    wanted = first
    for sample, following in ((samples[0], samples[2]), (samples[2], samples[4])):
        right = true_answers or sample["turn"] > 1
        key = following["key"]
        wanted += f" {sample['value'] if right else 1000000}."
        wanted += f" What is the special magic number for {key}? {MAGIC} {key} is"
    assert last == wanted
    assert {samples[i]["key"] for i in (0, 2, 4)} == set(re.findall(rf"{MAGIC} (\w+) is", first))
    assert all(len(ids) <= 800 - 16 for ids in oracle.prompts)
    if true_answers:
        assert [len(ids) for ids in oracle.prompts[4:]] == [784, 784]


def test_long_answers_fit_as_well(haystack: Haystack, tokenizer: Tokenizer) -> None:
    words = tokenizer.decode(tokenizer.encode(" rain fell and fell" * 9)[:16])
    oracle, _ = turns(haystack, tokenizer, TurnPlan([800], turns=4, runs=1), lambda _: words)
    assert max(len(ids) for ids in oracle.prompts) <= 800 - 16


def test_a_chat_of_several_turns(haystack: Haystack, tokenizer: Tokenizer) -> None:
    plan = TurnPlan([800], turns=2, runs=1)
    oracle, samples = turns(haystack, tokenizer, plan, chat=True)
    assert [sample["score"] for sample in samples] == [1, 1]
    assert f"Assistant: {samples[0]['value']}." in oracle.texts[1]
    assert oracle.texts[1].count("User:") == 2 and oracle.texts[1].endswith("Assistant:")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (" 123. The", " 123."),
        (" 123", " 123."),
        ("\n 12\n3", "\n 12."),
        ("", "."),
    ],
)
def test_an_answer_is_kept_up_to_its_end(text: str, kept: str) -> None:
    assert first_sentence(text) == kept


def test_the_report_of_turns(haystack: Haystack, tokenizer: Tokenizer) -> None:
    def tired(shown: str) -> str:
        return find(shown) if shown.count("What is") < 3 else "?"

    words, plan = Words.make(), TurnPlan([500, 600], turns=3, runs=2)
    done = evaluate_turns(Oracle(tokenizer, tired), tokenizer, haystack, plan, words)
    report = turn_report("m", plan, words, *done)
    assert report.grids[0].values == [[1, 1], [1, 1], [0, 0]]
    assert report.cells[2] == {
        "length": 500, "turn": 3, "questions": 2, "right": 0, "accuracy": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("multi-hop", ["--hops", "0,1", "--chains", "2"]),
        ("multi-turn", ["--turns", "2"]),
    ],
)
def test_the_commands(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, more: list[str]
) -> None:
    command = ["eval", kind, "bundled", str(text), "--lengths", "256", "--runs", "1", "--json"]
    more += ["--max-tokens", "3", "--output", str(tmp_path)]
    assert cli.main([*command, *more]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "report.json").read_text())
    assert printed["kind"] == kind and len(printed["samples"]) == (4 if kind == "multi-hop" else 2)
    assert all(sample["prompt_tokens"] <= 253 for sample in printed["samples"])
