"""The live page in a browser, on a server with the bundled model. Skipped where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import PROGRAM, Tab, browser
from live import LiveServer, live

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
KEY = "an-api-key"
PROMPT = "It is a truth universally acknowledged, that a single man"
# Steps that take long enough to be seen.
SLOW = """
import sys, time
from yocolm.cli import main
from yocolm.engine.engine import Engine
step = Engine.step
Engine.step = lambda self: (time.sleep(0.015), step(self))[1]
sys.exit(main())
"""
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live("--page-size", "16", program=SLOW) as running:
        yield running


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(tab: Tab, server: LiveServer) -> Iterator[Tab]:
    """The page of the server without keys, with its first numbers."""
    tab.events.clear()
    tab.show(*WIDTHS["desktop"])
    tab.open(server.url + "/")
    tab.until("!document.getElementById('main').hidden")
    yield tab
    # The browser itself notes that a request was refused, which a test may want.
    assert [text for text in tab.complaints() if "status of 400" not in text] == []
    assert tab.hosts() == {server.url}


def send(page: Tab, prompt: str, tokens: int = 24) -> str:
    """Send a prompt from the page; the answer, whole."""
    page.value(f"document.getElementById('max-tokens').value = {tokens}")
    page.value("document.getElementById('prompt').value = ''")
    page.type("#prompt", prompt)
    page.click("#send")
    page.until("document.getElementById('send').textContent === 'Send'")
    return page.value("[...document.querySelectorAll('.answer, .turn.assistant')].at(-1).innerText")


def told(page: Tab) -> dict[str, str]:
    """What the page tells of the last answer."""
    pairs = "[...document.querySelectorAll('#told div')].map((d) => [...d.children]"
    return dict(page.value(f"{pairs}.map((part) => part.innerText))"))


def test_a_prompt_from_the_page(page: Tab, server: LiveServer) -> None:
    page.value("document.getElementById('temperature').value = 0")
    answer = send(page, PROMPT)
    fields = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = server.post("/v1/completions", fields)[1]["choices"][0]["text"]
    assert answer.split() == whole.split() and len(answer) > 20
    facts = told(page)
    assert facts["tokens"] == "24" and facts["end"] == "length"
    assert facts["first token"].endswith("s") and facts["predicted"].endswith("s")
    cached = int(facts["prompt"].split(", ")[1].split()[0])
    assert cached == 0 and page.text(".said").startswith(PROMPT)
    send(page, PROMPT + ". " + answer)
    page.until("document.querySelectorAll('#ttft circle').length > 0")
    assert "median error" in page.text("#ttft .legend")


def test_a_conversation_on_the_page(page: Tab) -> None:
    page.click("#as-chat")
    first = f"{PROMPT} in possession of a good fortune, must be in want of a wife. Who is Emma?"
    send(page, first)
    send(page, "And who is <b>Anne</b>?")
    turns = page.value("[...document.querySelectorAll('.turn')].map((turn) => turn.innerText)")
    assert turns[0] == first and turns[2] == "And who is <b>Anne</b>?"  # not bold
    assert len(turns) == 4 and all(turns)
    cached = int(told(page)["prompt"].split(", ")[1].split()[0])
    assert cached > 0, "the second turn begins with the first"
    page.click("#clear")
    assert page.value("document.querySelectorAll('.turn').length") == 0


def test_running_requests_are_shown_and_can_be_stopped(page: Tab, server: LiveServer) -> None:
    page.value("document.getElementById('max-tokens').value = 1900")
    page.type("#prompt", PROMPT)
    page.click("#send")
    row = page.until("document.querySelector('#listed tr')?.innerText")
    assert "cmpl-" in row and ("decode" in row or "prefill" in row)
    assert PROMPT not in page.text("#requests")
    assert page.value("document.querySelectorAll('#phases .area').length") == 5
    page.click("#send")
    page.until("document.getElementById('send').textContent === 'Send'")
    assert told(page)["end"] == "stopped"
    page.until("document.getElementById('requests').hidden")
    server.wait_until_idle()


def test_what_the_server_refuses_is_told(page: Tab) -> None:
    page.type("#prompt", PROMPT)
    page.value("document.getElementById('max-tokens').value = 99999")
    page.click("#send")
    text = page.until("document.getElementById('play-error').innerText")
    assert "max_tokens=99999" in text and "lower max_tokens" in text
    assert send(page, PROMPT, 4) and page.value("document.getElementById('play-error').hidden")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_can_be_read(page: Tab, width: str, dark: bool, tmp_path: Path) -> None:
    page.show(*WIDTHS[width], dark)
    page.open(page.value("location.href"))
    page.until("!document.getElementById('main').hidden")
    page.until("document.querySelectorAll('.plot svg').length === 6")
    assert page.value("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert page.value("document.documentElement.scrollWidth") <= WIDTHS[width][0]
    outside = page.value(
        "[...document.querySelectorAll('.card *, .tile *')].filter((e) => e.clientWidth && "
        "e.getBoundingClientRect().right > innerWidth).length"
    )
    assert outside == 0
    assert page.value(_CONTRAST) >= 4.5
    before = page.value("document.documentElement.dataset.theme")
    page.click("#theme")
    assert page.value("document.documentElement.dataset.theme") != before
    page.value("localStorage.clear()")
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


# The least contrast of text on what it stands on, by the formula of WCAG 2.
_CONTRAST = """
(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (/^rgb\\(/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const ratios = [...document.querySelectorAll("h1,h2,h3,p,span,b,small,a,label,button,th,td")]
    .filter((e) => e.clientWidth + e.offsetWidth > 0 && e.childNodes.length
      && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => [light(getComputedStyle(e).color), light(ground(e))])
    .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  return Math.min(...ratios);
})()
"""


def test_a_key_is_asked_for(tab: Tab) -> None:
    with live("--api-key", KEY) as server:
        tab.show(*WIDTHS["desktop"])
        tab.open(server.url + "/")
        tab.until("!document.getElementById('key').hidden")
        assert tab.value("document.getElementById('main').hidden")
        for text in ("wrong", KEY):
            tab.type("#key-text", text)
            tab.click("#key button")
            if text != KEY:
                tab.until("!document.getElementById('key-wrong').hidden")
        tab.until("!document.getElementById('main').hidden")
        assert tab.value("document.getElementById('key').hidden")
        assert send(tab, PROMPT, 4)
        tab.open(server.url + "/")  # it is known in this tab
        tab.until("!document.getElementById('main').hidden")
        assert KEY not in tab.value("document.documentElement.outerHTML")
        assert KEY not in tab.value("JSON.stringify({...localStorage})")
