"""What needles and questions say. No torch here.

A template has a needle with `{key}` and `{value}`, a question with `{key}`, and a cue: how the
answer begins, for models that continue text. `{keys}` stands in what is asked jointly.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter

from yocolm.errors import RequestError

MOST_DIGITS = 18


@dataclass(frozen=True)
class Template:
    """Sentences to hide and to ask with. ``link`` says that a key has the value of ``{other}``."""

    needle: str
    question: str
    cue: str
    joint_question: str = ""
    joint_cue: str = ""
    link: str = ""


TEMPLATES = {
    "magic": Template(
        "The special magic number for {key} is {value}.",
        "What is the special magic number for {key}?",
        "The special magic number for {key} is",
        "What are the special magic numbers for {keys}?",
        "The special magic numbers for {keys} are",
        "The special magic number for {key} is the same as the one for {other}.",
    ),
    "authors": Template(  # the words of the YOCO authors' script
        "The special magic {key} number is {value}.",
        "What is the special magic {key} number?",
        "The special magic {key} number is",
        "What are the special magic numbers of {keys}?",
        "The special magic numbers of {keys} are",
        "The special magic {key} number is the {other} one.",
    ),
    "letter": Template(  # words that share nothing with the others
        "Whoever writes to {key} must put {value} on the envelope.",
        "What must be put on the envelope of a letter to {key}?",
        "Whoever writes to {key} must put",
        "What must be put on the envelopes of letters to {keys}?",
        "Whoever writes to {keys} must put",
        "Whoever writes to {key} must put on the envelope what is put there for {other}.",
    ),
}
CITIES = tuple(
    "Amsterdam Ankara Antwerp Athens Auckland Baghdad Bangkok Barcelona Beijing Beirut Belgrade "
    "Berlin Bogota Bologna Bombay Bordeaux Boston Brisbane Brussels Bucharest Budapest Cairo "
    "Calcutta Calgary Caracas Casablanca Chicago Cologne Copenhagen Dakar Dallas Damascus Delhi "
    "Denver Detroit Dresden Dubai Dublin Edinburgh Florence Frankfurt Geneva Genoa Glasgow "
    "Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Jerusalem Johannesburg Kabul Karachi "
    "Khartoum Kiev Kingston Kyoto Lagos Leipzig Lima Lisbon Liverpool Lyon Madrid Manila "
    "Marseille Melbourne Miami Milan Minsk Mombasa Montreal Moscow Munich Nairobi Naples Odessa "
    "Osaka Oslo Ottawa Paris Perth Philadelphia Prague Quito Riga Rome Rotterdam Santiago Seattle "
    "Seoul Seville Shanghai Singapore Sofia Stockholm Sydney Taipei Tallinn Tangier Tehran Tokyo "
    "Toronto Trieste Tripoli Tunis Turin Valencia Vancouver Venice Vienna Vilnius Warsaw "
    "Wellington Winnipeg Yokohama Zagreb Zurich".split()
)
_ADJECTIVES = (
    "amber brittle copper crooked dusty faded gilded hollow ivory narrow painted quiet "
    "rusty silver slender velvet"
).split()
_NOUNS = (
    "anchor basket candle compass drawer feather hammer kettle ladder lantern mirror pitcher "
    "ribbon saddle thimble trumpet"
).split()


def _codes(count: int) -> tuple[str, ...]:
    """Different words of five consonants, always the same ones."""
    rng = random.Random(0)
    codes: dict[str, None] = {}
    while len(codes) < count:
        codes["".join(rng.choices("BDFGKLMNPRSTVXZ", k=5))] = None
    return tuple(codes)


KEY_LISTS: dict[str, Sequence[str]] = {
    "cities": CITIES,
    "words": tuple(f"the {adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS),
    "codes": _codes(200),
}
_FIELDS = {
    "needle": {"key", "value"},
    "question": {"key"},
    "cue": {"key"},
    "joint_question": {"keys"},
    "joint_cue": {"keys"},
    "link": {"key", "other"},
}


def template(name: str = "magic", **own: str | None) -> Template:
    """A template by name, with texts of one's own (None: its own).

    Raises RequestError for an unknown name or a text without its fields, or with others.
    """
    if name not in TEMPLATES:
        raise RequestError(f"template {name!r} is unknown; give one of {', '.join(TEMPLATES)}")
    changed = {what: text for what, text in own.items() if text is not None}
    for what, text in changed.items():
        _check_fields(what, text)
    return replace(TEMPLATES[name], **changed)


def _check_fields(what: str, text: str) -> None:
    try:
        fields = [field[1:] for field in Formatter().parse(text) if field[1] is not None]
    except ValueError as error:
        raise RequestError(f"{what} {text!r} is no template: {error}") from error
    found, wanted = {name for name, _, _ in fields}, _FIELDS[what]
    must = wanted if what in ("needle", "link") else set()
    if not must <= found <= wanted:
        listed = " and ".join(f"{{{name}}}" for name in sorted(wanted))
        raise RequestError(f"{what} {text!r} must have {listed} in it, and no other field")
    if any(form or conversion for _, form, conversion in fields):
        raise RequestError(f"{what} {text!r} has a format in a field; give the name alone")


def load_keys(name: str) -> Sequence[str]:
    """A list by name, or the lines of a UTF-8 file; RequestError if they are none or repeat."""
    if name in KEY_LISTS:
        return KEY_LISTS[name]
    path = Path(name)
    if not path.is_file():
        raise RequestError(
            f"keys {name!r} is neither a file nor one of {', '.join(KEY_LISTS)}: give a file with "
            "one key a line"
        )
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: byte {error.start}") from error
    keys = [line for line in lines if line]
    repeated = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
    if not keys or repeated is not None:
        what = f"has {repeated!r} twice" if keys else "holds no key"
        raise RequestError(f"{path} {what}; give different keys, one a line")
    return keys


def draw_keys(keys: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """``count`` different keys."""
    if count > len(keys):
        raise RequestError(
            f"{count} different keys are needed and there are {len(keys)}; give a longer list, or "
            "hide fewer needles"
        )
    return rng.sample(list(keys), count)


def check_digits(digits: int) -> None:
    """Raise RequestError for a number of digits that needles cannot have."""
    if not 1 <= digits <= MOST_DIGITS:
        raise RequestError(f"digits is {digits}; it must be from 1 to {MOST_DIGITS}")


def draw_numbers(
    digits: int, count: int, rng: random.Random, taken: Callable[[str], bool]
) -> list[str]:
    """``count`` different numbers of so many digits, none of which is ``taken``."""
    drawn: dict[str, None] = {}
    for _ in range(1000 * count):
        number = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
        if not taken(number):
            drawn[number] = None
        if len(drawn) == count:
            return list(drawn)
    raise RequestError(
        f"{count} numbers of {digits} digits that are not in the text could not be found; give "
        "more digits"
    )


def numbers_in(text: str, digits: int) -> list[str]:
    """The whole numbers in ``text`` of at least so many digits; "1,234,567" is one."""
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return [number for number in re.findall(r"\d+", plain) if len(number) >= digits]


def listed(names: Sequence[str]) -> str:
    """ "A", "A and B", "A, B and C"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
