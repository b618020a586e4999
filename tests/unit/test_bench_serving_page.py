"""The report of `yocolm bench serving` in a browser: widths, colours, what the pointer shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import PROGRAM, Tab, browser
from made_up_run import made_up_run
from yocolm.bench.serving_report import report
from yocolm.eval.charts import bytes_text

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium here")
POOL = "document.querySelector('#pools .canvas')"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    path: Path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(report(made_up_run(200, 40)), encoding="utf-8")
    with browser() as opened:
        opened.open(path.as_uri())
        yield opened


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_it_fits_every_width(tab: Tab, width: int) -> None:
    tab.show(width, 900)
    assert tab.value("document.documentElement.scrollWidth") == width
    sizes = tab.value("[...document.querySelectorAll('.canvas')].map(c => c.clientWidth)")
    assert len(sizes) > 12 and min(sizes) > 200
    # No word of an axis lies over its neighbour.
    overlaps = tab.value(
        """[...document.querySelectorAll('.xs')].flatMap(axis => {
          const boxes = [...axis.children].map(s => s.getBoundingClientRect())
            .filter(box => box.width).sort((a, b) => a.left - b.left);
          return boxes.slice(1).filter((box, i) => box.left < boxes[i].right)
            .map(() => axis.innerText);
        })"""
    )
    assert overlaps == []
    assert tab.complaints() == [] and tab.hosts() == {"file://"}


def test_dark_and_light(tab: Tab) -> None:
    seen = []
    for dark in (False, True):
        tab.show(1280, 900, dark)
        style = "getComputedStyle(document.body)"
        back, ink = (tab.value(f"{style}.{name}") for name in ("backgroundColor", "color"))
        light = [sum(map(int, c.strip("rgb()").split(", "))) for c in (back, ink)]
        assert (light[0] < light[1]) == dark and abs(light[0] - light[1]) > 400
        seen.append(tab.value("getComputedStyle(document.querySelector('path.line.used')).stroke"))
    assert seen[0] != seen[1]


def test_the_pointer_shows_numbers(tab: Tab) -> None:
    tab.show(1280, 900)
    tab.value(f"{POOL}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = tab.value(f"(b => [b.left, b.top, b.width, b.height])({POOL}.getBoundingClientRect())")
    left, top, width, height = box
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width - 2, y=top + height / 2)
    tip = tab.until(f"{POOL}.querySelector('.tip')?.innerText")
    number = int(tip.split("step ")[1].split("\n")[0])
    pages = made_up_run(200, 40)["steps"]["pages_used"][number - 1]
    assert number > 150 and f"{bytes_text(65536 * pages)} ({pages} pages)" in tip
    placed = tab.value(
        "(t => [t.left, t.right])(document.querySelector('.tip').getBoundingClientRect())"
    )
    assert 0 <= placed[0] < placed[1] <= left + width
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left - 40, y=top - 40)
    assert tab.value("document.querySelectorAll('.tip').length") == 0
    tab.value(f"{POOL}.focus()")
    for key, step in (("Home", "step 1\n"), ("ArrowRight", "step 2\n"), ("End", "step 200\n")):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert step in tab.text(".tip")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert tab.value("document.querySelectorAll('.tip').length") == 0
