"""The documents say what the code does: commands, options, links, lengths."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from yocolm.cli import build_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == load(ROOT / "docs" / "make_cli.py").render(), "run `make docs`"


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 600


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|recipes)/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_commands_in_the_readme_parse() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    commands = [line for line in "".join(blocks).splitlines() if line.startswith("yocolm ")]
    assert len(commands) >= 5
    for command in commands:
        options = build_parser().parse_args(shlex.split(command, comments=True)[1:])
        for argument in shlex.split(command):
            if argument.startswith("recipes/"):
                assert yaml.safe_load((ROOT / argument).read_text()), options


def test_make_targets_in_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"\bmake (\w+)`", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_python_in_the_readme_compiles_and_imports_public_names() -> None:
    import yocolm

    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(example, "README.md", "exec")
    [names] = re.findall(r"from yocolm import (.+)", example)
    assert set(names.split(", ")) <= set(yocolm.__all__)


def test_dependencies_are_explained() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    [listed] = re.findall(r"^dependencies = \[(.*?)\]", project, re.DOTALL | re.MULTILINE)
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for name in re.findall(r'"([A-Za-z0-9_]+)', listed):
        assert f"| {name} " in page, name


def test_pins_are_exact_and_name_no_source() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert re.fullmatch(r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.11")?', line), line
