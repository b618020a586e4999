"""The layers of docs/design.md, held by the syntax trees of the sources."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "src" / "yocolm").rglob("*.py"))
}
EVERYONE = {"errors", "config", "configs", "fields"}
# A layer -> what it may import: a layer, or one module of it. Any may import itself and EVERYONE.
ALLOWED = {
    **dict.fromkeys([*EVERYONE, "tokenizer", "template"], set()),
    "chat": {"template", "tokenizer"},
    "ops": set(),
    "models": {"ops", "tokenizer"},
    "engine": {"models.spec", "models.base", "models.registry", "ops", "chat", "tokenizer"},
    "server": {"engine", "chat", "tokenizer"},
    "train": {"models", "ops", "chat", "tokenizer"},
    "eval": {"engine", "models", "tokenizer"},
    "bench": {"engine", "models", "ops", "server", "eval", "tokenizer"},
}
NO_TORCH = (
    "yocolm yocolm.chat yocolm.template.sandbox yocolm.cli yocolm.config yocolm.errors "
    "yocolm.models.spec yocolm.models.presets "
    "yocolm.engine.scheduler yocolm.engine.pages yocolm.engine.plan yocolm.engine.request "
    "yocolm.engine.sampling_params yocolm.engine.outputs yocolm.engine.settings "
    "yocolm.engine.memory yocolm.engine.transfers yocolm.engine.policy yocolm.engine.cost "
    "yocolm.engine.prefix yocolm.engine.prefix_nodes yocolm.engine.prefix_order "
    "yocolm.engine.prefix_check yocolm.engine.swap_space yocolm.engine.swap_file "
    "yocolm.engine.setup yocolm.engine.steps yocolm.engine.hardware yocolm.engine.forecast "
    "yocolm.engine.setup yocolm.engine.trace yocolm.engine.simulate yocolm.bench.simulated "
    "yocolm.bench.goodput yocolm.bench.capacity yocolm.cli_simulate yocolm.train.settings "
    "yocolm.train.parsing yocolm.train.checks yocolm.eval.words "
    "yocolm.models.activations yocolm.bench.paper yocolm.bench.paper_reference "
    "yocolm.bench.paper_report yocolm.bench.paper_page"
).split()
# Imported where they are used: optional packages, and those that few need and that load slowly.
OPTIONAL = re.compile(
    r"(llguidance|tiktoken|huggingface_hub|tensorboard|torch\.utils\.tensorboard|wandb|"
    r"datasets|pyarrow|lm_eval|matplotlib|gguf|accelerate|transformers)\b"
)
FAMILIES = re.compile(r"yoco(?!lm)|llama|gemma", re.IGNORECASE)


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names imported under `tree`, `if TYPE_CHECKING:` blocks left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in SOURCES else str(node.module)
        else:
            yield from imports(node)


@cache
def imported(module: str) -> frozenset[str]:
    return frozenset(imports(ast.parse(SOURCES[module].read_text())))


@cache
def reached(module: str) -> frozenset[str]:
    """All that importing `module` loads, as far as our own sources tell."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        parents = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 1)]
        new = {*(imported(name) if name in SOURCES else ()), *parents} - seen
        seen |= new
        todo += new
    return frozenset(seen)


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    layer = module.split(".")[1] if "." in module else "yocolm"
    if layer in ("yocolm", "__main__") or layer.startswith("cli"):
        return
    for name in imported(module):
        if not name.startswith("yocolm."):
            continue
        target = name.removeprefix("yocolm.")
        permitted = ALLOWED[layer] | EVERYONE | {layer}
        assert any(target == p or target.startswith(p + ".") for p in permitted), name


@pytest.mark.parametrize("module", [name for name in NO_TORCH if name in SOURCES])
def test_modules_that_work_without_torch(module: str) -> None:
    heavy = {name for name in reached(module) if name.split(".")[0] in ("torch", "transformers")}
    assert not heavy


@pytest.mark.parametrize("module", SOURCES)
def test_no_import_cycles(module: str) -> None:
    assert all(module not in reached(name) for name in imported(module) if name in SOURCES)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_inside_functions_are_of_optional_packages(module: str) -> None:
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            assert all(map(OPTIONAL.match, imports(node))), f"line {node.lineno}"


@pytest.mark.parametrize("module", [name for name in SOURCES if ".engine" in name])
def test_the_engine_names_no_family(module: str) -> None:
    assert not FAMILIES.search(SOURCES[module].read_text())


def test_files_are_short() -> None:
    folders = [ROOT / part for part in ("src", "tests", "docs", "recipes", "bench")]
    kinds = ("*.py", "*.cpp", "*.h", "*.sh")
    paths = [path for folder in folders for kind in kinds for path in folder.rglob(kind)]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > 450} == {}
