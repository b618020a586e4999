"""Needles: where they lie, what is asked, and what counts as right."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from oracle import MAGIC, Oracle, find
from yocolm import cli
from yocolm.errors import NumericsError, RequestError
from yocolm.eval.asking import Asker, Words, default_lengths, groups, open_llm
from yocolm.eval.haystack import Haystack
from yocolm.eval.needle import NeedlePlan, evaluate_needles, needle_report, score_numbers
from yocolm.eval.words import CITIES, KEY_LISTS, TEMPLATES, load_keys, numbers_in, template
from yocolm.models.registry import load_tokenizer
from yocolm.tokenizer import Tokenizer

WORDS = "the old tall grey man woman horse queen walked two miles to Bath and said no more".split()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer("bundled")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = random.Random(1), tmp_path_factory.mktemp("text") / "text.txt"
    lines = [" ".join(["The", *rng.choices(WORDS, k=rng.randint(1, 24))]) for _ in range(300)]
    path.write_text(".\n".join(lines))
    return path


@pytest.fixture(scope="module")
def haystack(text: Path, tokenizer: Tokenizer) -> Haystack:
    return Haystack.from_files([text], tokenizer)


def ask(
    haystack: Haystack, tokenizer: Tokenizer, plan: NeedlePlan, answer: Any = find, **words: Any
) -> tuple[Oracle, list[dict[str, Any]]]:
    oracle = Oracle(tokenizer, answer)
    return oracle, evaluate_needles(oracle, tokenizer, haystack, plan, Words.make(**words))[0]


def test_every_prompt_has_its_length_its_needle_and_its_question(
    haystack: Haystack, tokenizer: Tokenizer
) -> None:
    plan = NeedlePlan([200, 333, 1000], runs=3)
    oracle, samples = ask(haystack, tokenizer, plan)
    assert len(samples) == 3 * 11 * 3
    assert [len(ids) + 16 for ids in oracle.prompts] == [sample["length"] for sample in samples]
    assert all(sample["score"] == 1 for sample in samples)
    assert all(params.max_tokens == 16 and params.temperature == 0 for params in oracle.params)
    for shown, sample in zip(oracle.texts, samples, strict=True):
        [key], [value] = sample["keys"], sample["values"]
        assert key in CITIES and re.fullmatch("[1-9][0-9]{6}", value)
        needle = f" {MAGIC} {key} is {value}."
        assert shown.count(needle) == 1
        assert shown.endswith(f" What is the special magic number for {key}? {MAGIC} {key} is")
        before, _, behind = shown.partition(needle)
        assert before == "" or before.endswith(".")  # between sentences
        assert re.match(r"\n+The| What", behind)
        tokens = len(tokenizer.encode(before, add_special_tokens=False))
        body = sample["length"] - 16 - 40
        assert abs(tokens - sample["depth"] * body) <= 45  # half a sentence, and the question
        assert sample["depths"][0] == pytest.approx(tokens / body, abs=0.1)
    deepest = [sample["depth"] for sample in samples[:11]]
    assert deepest == sorted(deepest, reverse=True)


def test_runs_have_texts_and_keys_of_their_own(haystack: Haystack, tokenizer: Tokenizer) -> None:
    oracle, samples = ask(haystack, tokenizer, NeedlePlan([500], [0.5], runs=10))
    assert len({shown[:60] for shown in oracle.texts}) > 5
    assert len({sample["keys"][0] for sample in samples}) == 10


def test_questions_follow_from_the_seed_whatever_else_is_asked(
    haystack: Haystack, tokenizer: Tokenizer
) -> None:
    oracle, _ = ask(haystack, tokenizer, NeedlePlan([300], [0.2], runs=2))
    more, _ = ask(haystack, tokenizer, NeedlePlan([200, 300], [0, 0.2, 1], (2, 1), runs=3))
    other, _ = ask(haystack, tokenizer, NeedlePlan([300], [0.2], runs=2, seed=1))
    assert set(oracle.texts) < set(more.texts)
    assert not set(oracle.texts) & set(other.texts)


@pytest.mark.parametrize("needles", [1, 2, 4, 8])
def test_several_needles_have_different_keys_and_numbers(
    haystack: Haystack, tokenizer: Tokenizer, needles: int
) -> None:
    oracle, samples = ask(haystack, tokenizer, NeedlePlan([900], [0, 0.5, 1], (needles,), runs=4))
    for shown, sample in zip(oracle.texts, samples, strict=True):
        found = re.findall(rf"{MAGIC} (\w+) is (\d+)\.", shown)
        keys, values = zip(*found, strict=True)
        assert len(set(keys)) == len(set(values)) == len(keys) == needles
        assert len(tokenizer.encode(shown, add_special_tokens=False)) == pytest.approx(884, abs=2)
        assert sample["score"] == 1 and sample["keys"][0] in keys
    # The asked one lies at the depth of the cell, not always before or behind the others.
    assert {round(sample["depths"][0], 1) for sample in samples} == {0, 0.5, 1}


def test_all_can_be_asked_for_one_by_one(haystack: Haystack, tokenizer: Tokenizer) -> None:
    plan = NeedlePlan([900], [0.5], (4,), ask=None, runs=2)
    oracle, samples = ask(haystack, tokenizer, plan)
    assert len(samples) == 8 and all(sample["score"] == 1 for sample in samples)
    texts = {shown.rpartition(" What is")[0] for shown in oracle.texts}
    assert len(texts) == 2  # the same text for all four
    sizes = [len(ids) for ids in oracle.prompts]
    assert [max(sizes[:4]), max(sizes[4:])] == [900 - 16] * 2  # the longest question fills it
    some = ask(haystack, tokenizer, NeedlePlan([900], [0.5], (1, 4), ask=2, runs=2))[1]
    assert [sample["needles"] for sample in some] == [1, 1, 4, 4, 4, 4]


def test_several_can_be_asked_for_jointly(haystack: Haystack, tokenizer: Tokenizer) -> None:
    def three(shown: str) -> str:
        keys = re.findall(r"\w+", shown.rpartition("numbers for ")[2].removesuffix(" are"))
        assert keys.pop(-2) == "and" and len(keys) == 4
        found = [re.findall(rf"{MAGIC} {key} is (\d+)\.", shown)[0] for key in keys]
        return f" {found[3]}, {found[0]}, {found[1]} and 1{found[2]}."

    plan = NeedlePlan([900], [0.5], (4,), ask=None, jointly=True, runs=2)
    oracle, samples = ask(haystack, tokenizer, plan, three)
    assert [sample["score"] for sample in samples] == [0.75, 0.75]
    assert all(len(ids) == 900 - 4 * 16 for ids in oracle.prompts)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 1234567.", True),
        (" 1234567", True),
        (" 1,234,567 it is", True),
        ("\n\nIn 3 words: 1234567 or 7654321", True),
        (" 123456", False),
        (" 12345678", False),
        (" 91234567", False),
        (" 7654321, no, 1234567", False),
        ("", False),
        (" twelve", False),
    ],
)
def test_right_is_the_exact_number(answer: str, right: bool) -> None:
    assert score_numbers(answer, ["1234567"], 7) == right


def test_numbers_of_an_answer() -> None:
    assert numbers_in("12, 1234 and 12,345,678 or 12,34", 4) == ["1234", "12345678"]


def test_numbers_in_the_text_are_no_needles(tokenizer: Tokenizer) -> None:
    numbers = frozenset(str(n) for n in range(10) if n != 7)
    ids = tokenizer.encode("It rained. " * 100, add_special_tokens=False)
    haystack = Haystack(ids, range(0, len(ids) - 5, 5), numbers)
    _, samples = ask(haystack, tokenizer, NeedlePlan([100], [0.5], runs=3), digits=1)
    assert [sample["values"] for sample in samples] == [["7"]] * 3
    with pytest.raises(RequestError, match="2 numbers of 1 digits that are not in the text"):
        ask(haystack, tokenizer, NeedlePlan([100], [0.5], (2,)), digits=1)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_and_key_list_can_be_answered(
    haystack: Haystack, tokenizer: Tokenizer, name: str
) -> None:
    form = TEMPLATES[name]

    def look(shown: str) -> str:
        key = next(key for key in KEY_LISTS["words"] if shown.endswith(form.cue.format(key=key)))
        pattern = re.escape(form.needle.format(key=key, value="@")).replace("@", r"(\d+)")
        assert form.question.format(key=key) in shown
        return " " + re.findall(pattern, shown)[0]

    plan = NeedlePlan([400], [0.5], (4,), runs=3)
    _, samples = ask(haystack, tokenizer, plan, look, name=name, keys="words")
    assert [sample["score"] for sample in samples] == [1, 1, 1]


def test_words_of_ones_own(haystack: Haystack, tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\ufeffMrs. Long\n\nCharlotte\n")  # as some editors begin files
    assert load_keys(str(keys)) == ["Mrs. Long", "Charlotte"]
    oracle, samples = ask(
        haystack,
        tokenizer,
        NeedlePlan([400], [0.5], (2,), runs=2),
        lambda shown: re.findall(r"owes (\d+) to Charlotte", shown)[0],
        needle="Lydia owes {value} to {key}.",
        question="How much to {key}?",
        cue="To {key} Lydia owes",
        keys=str(keys),
        digits=4,
        preamble="Read on.",
    )
    asked = [sample["keys"][0] for sample in samples]
    assert [sample["score"] for sample in samples] == [float(key == "Charlotte") for key in asked]
    assert all(shown.startswith("Read on.") for shown in oracle.texts)
    assert oracle.texts[0].endswith(f" How much to {asked[0]}? To {asked[0]} Lydia owes")


def test_bad_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needle 'no field' must have {key} and {value}"):
        template(needle="no field")
    with pytest.raises(RequestError, match="question '{what}' must have {key}"):
        template(question="{what}")
    for text in ("{value:d} {key}", "{value!r} {key}", "{value:{key}} {key}"):
        with pytest.raises(RequestError, match="has a format in a field"):
            template(needle=text)
    with pytest.raises(RequestError, match="cue '{' is no template"):
        template(cue="{")
    with pytest.raises(RequestError, match="template 'x' is unknown; give one of magic"):
        template("x")
    with pytest.raises(RequestError, match="neither a file nor one of cities, words, codes"):
        load_keys("x")
    path = tmp_path / "keys"
    path.write_text("a\nb\na\n")
    with pytest.raises(RequestError, match="has 'a' twice"):
        load_keys(str(path))
    path.write_text("\n")
    with pytest.raises(RequestError, match="holds no key"):
        load_keys(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(RequestError, match="not UTF-8"):
        load_keys(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": []}, "lengths is .*at least 1"),
        ({"depths": []}, "depths are"),
        ({"depths": [1.5]}, "must be from 0 to 1"),
        ({"needles": [0]}, "needles is"),
        ({"runs": 0}, "runs is 0"),
        ({"ask": 0}, "ask is 0"),
        ({"lengths": [200, 100, 200]}, "lengths have 200 twice"),
        ({"depths": [0.5, 0.5]}, "depths have 0.5 twice"),
        ({"needles": [2, 1, 2]}, "numbers of needles have 2 twice"),
    ],
)
def test_bad_plans_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        NeedlePlan(**{"lengths": [100], **fields})


def test_what_does_not_fit_is_refused(haystack: Haystack, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="length of 40 tokens leaves no room for text"):
        ask(haystack, tokenizer, NeedlePlan([40]))
    with pytest.raises(RequestError, match="121 different keys are needed and there are 120"):
        ask(haystack, tokenizer, NeedlePlan([9000], needles=[121]))


def test_a_chat_holds_text_and_question(haystack: Haystack, tokenizer: Tokenizer) -> None:
    oracle, samples = ask(
        haystack, tokenizer, NeedlePlan([400], [0.5], runs=2), chat=True, preamble="Read this."
    )
    assert [sample["score"] for sample in samples] == [1, 1]
    for ids, shown, params in zip(oracle.prompts, oracle.texts, oracle.params, strict=True):
        assert len(ids) == 400 - 64 and params.max_tokens == 64
        assert params.stop == ["<|turn-end|>"]
        frame = oracle.chat_prompt([{"role": "user", "content": "#"}])["prompt"]
        before, _, behind = frame.partition("#")
        assert shown.startswith(f"{before}Read this.") and shown.endswith(f"?{behind}")
        assert "number for" in shown and not shown.endswith(" is")


@pytest.mark.parametrize(("digits", "room"), [(1, 16), (7, 16), (8, 16), (9, 17), (18, 26)])
def test_an_answer_has_room_for_its_digits(digits: int, room: int) -> None:
    words = Words.make(digits=digits)
    assert words.room() == room and words.room(3) == 3 * room
    assert Words.make(digits=digits, max_tokens=5).room(3) == 5


@pytest.mark.parametrize("digits", [0, 19])
def test_digits_are_checked_first(
    digits: int, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=f"digits is {digits}; it must be from 1 to 18"):
        Words.make(digits=digits)
    if digits:  # before a model is looked for
        lengths = ["--lengths", "1K", "--digits", str(digits)]
        assert cli.main(["eval", "needle", "no-model", str(text), *lengths]) == 1
        assert f"digits is {digits}" in capsys.readouterr().err


def test_needles_far_from_their_depth_are_pointed_out(
    haystack: Haystack, tokenizer: Tokenizer
) -> None:
    def notes(text: Haystack, plan: NeedlePlan) -> list[str]:
        words, oracle = Words.make(), Oracle(tokenizer, find)
        done = evaluate_needles(oracle, tokenizer, text, plan, words)
        return needle_report("m", plan, words, *done, ["Before."]).notes

    # All needles are asked for; only the first of each text has a depth to lie at.
    assert notes(haystack, NeedlePlan([1500], (0, 0.5, 1), (4,), ask=None, runs=2)) == ["Before."]
    endless = Haystack(tokenizer.encode("word " * 5000, add_special_tokens=False), [0])
    _, note = notes(endless, NeedlePlan([500], (0, 0.3, 1), runs=2))
    assert note.startswith("2 of 6 texts have no end of a sentence near the depth of their cell")
    assert "up to 30 % of the text" in note


def test_prompts_exist_in_groups() -> None:
    assert list(groups([10] * 70)) == [
        list(range(32)),
        list(range(32, 64)),
        list(range(64, 70)),
    ]
    assert list(groups([3 << 20] * 3)) == [[0], [1], [2]]
    assert list(groups([1 << 21] * 3)) == [[0, 1], [2]]


def test_a_failed_prompt_is_an_error(tokenizer: Tokenizer) -> None:
    class Failing(Oracle):
        def generate(self, prompts: Any, sampling_params: Any = None) -> Any:
            outputs = super().generate(prompts, sampling_params)
            outputs[0].error = "logits are not finite"
            return outputs

    asker = Asker(Failing(tokenizer, str), Words.make())
    with pytest.raises(NumericsError, match="prompt of 3 tokens failed: logits"):
        asker.answer([[1, 2, 3]], 4)


def test_the_report(haystack: Haystack, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def half(shown: str) -> str:  # knows what lies in the second half
        at = re.search(rf"{MAGIC} \w+ is \d", shown)
        assert at is not None
        return find(shown) if at.start() > len(shown) * 0.3 else " <nothing>"

    words, plan = Words.make(), NeedlePlan([300, 600], [0, 0.5, 1], runs=2)
    samples, totals = evaluate_needles(Oracle(tokenizer, half), tokenizer, haystack, plan, words)
    report = needle_report("a & b", plan, words, samples, totals, ["A note."])
    assert report.summary["accuracy"] == pytest.approx(2 / 3) and totals["prompts"] == 12
    assert totals["prompt_tokens"] == 6 * (300 + 600 - 32)
    [grid] = report.grids
    assert grid.values == [[0, 0], [1, 1], [1, 1]] and grid.counts[0] == [2, 2]
    assert report.cells[0] == {
        "needles": 1, "length": 300, "depth": 0, "questions": 2, "right": 0, "accuracy": 0,
    }  # fmt: skip
    assert "66.7 % (8 of 12 right; 95 % interval 39.1 % to 86.2 %)" in report.text()
    assert "   50 %  100 %  100 %" in report.text() and "note: A note." in report.text()
    report.write(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["samples"] == samples
    page = (tmp_path / "report.html").read_text()
    assert "needle: a &amp; b" in page and page.count("rgb(20,110,130)") == 4
    assert "&lt;nothing&gt;" in page and "<nothing>" not in page and "http" not in page


def test_a_map_for_each_number_of_needles(haystack: Haystack, tokenizer: Tokenizer) -> None:
    def alone(shown: str) -> str:  # finds a needle that has none beside it
        return find(shown) if len(re.findall(rf"{MAGIC} \w+ is \d", shown)) == 1 else "?"

    words, plan = Words.make(), NeedlePlan([400, 600], [0, 1], (1, 2), runs=1)
    done = evaluate_needles(Oracle(tokenizer, alone), tokenizer, haystack, plan, words)
    by_number, one, two = needle_report("m", plan, words, *done).grids
    assert by_number.values == [[1, 1], [0, 0]]
    assert one.values == [[1, 1], [1, 1]] and two.values == [[0, 0], [0, 0]]


def test_the_picture(haystack: Haystack, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan, words = NeedlePlan([300], [0, 1], (1, 2), runs=1), Words.make()
    done = evaluate_needles(Oracle(tokenizer, find), tokenizer, haystack, plan, words)
    written = needle_report("m", plan, words, *done).write(tmp_path)
    assert written[-1].name == "report.png"
    assert written[-1].read_bytes().startswith(b"\x89PNG")


def test_lengths_go_up_to_the_models_context() -> None:
    assert default_lengths("bundled") == [1024 * 2**i for i in range(6)]


def test_the_engine_answers_and_shares_what_prompts_have_in_common(
    haystack: Haystack, tokenizer: Tokenizer
) -> None:
    llm, _ = open_llm("bundled", 1024, kv_memory="64MiB", max_num_batched_tokens=256)
    plan = NeedlePlan([1024], [0.2, 0.5, 1], runs=1)
    samples, totals = evaluate_needles(llm, tokenizer, haystack, plan, Words.make(max_tokens=2))
    assert [sample["prompt_tokens"] for sample in samples] == [1022] * 3
    # Half the second prompt begins as the first does: a state was kept at 256 tokens.
    assert totals["cached_tokens"] == 256


def test_the_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "needle", "bundled", str(text), "--lengths", "128", "--runs", "1"]
    more = ["--depths", "0,100", "--needles", "1,2", "--max-tokens", "3", "--json"]
    assert cli.main([*command, *more, "--output", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "report.json").read_text())
    assert [(cell["needles"], cell["depth"]) for cell in printed["cells"]] == [
        (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert cli.main([*command, "--keys", "nowhere"]) == 1
    assert "neither a file nor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "depths"),
    [
        ("3", [0, 0.5, 1]),
        ("1", [0.5]),
        ("50%", [0.5]),
        ("0%", [0]),
        ("0, 33.3%,100", [0, 0.333, 1]),
    ],
)
def test_depths_are_a_number_or_percentages(given: str, depths: list[float]) -> None:
    parsed = cli.build_parser().parse_args(["eval", "needle", "m", "f", "--depths", given])
    assert parsed.depths == pytest.approx(depths)


@pytest.mark.parametrize("given", ["0", "33.3", "-1", "101%", "x", "", "0,,1", "nan%"])
def test_other_depths_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["eval", "needle", "m", "f", f"--depths={given}"])
    assert "neither a number of depths nor percentages from 0 to 100" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["needle", "multi-hop", "multi-turn", "nll"])
def test_a_report_that_cannot_be_written_is_refused_first(
    kind: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    for place in (text, text / "below", tmp_path / "out"):
        assert cli.main(["eval", kind, "no-model", str(text), "--output", str(place)]) == 1
        assert f"report cannot be written to {place} (" in capsys.readouterr().err
