"""The native library: instruction set, compiler, cache, and what happens without one."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from yocolm.ops.native import build, library

ALL_X86 = build.INSTRUCTION_SETS[0].features
HAVE_COMPILER = any(build.shutil.which(name) for name in build.COMPILERS) and build.supported()
needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="no C++ compiler, or no kernels")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a library that is not loaded yet; afterwards the usual one again."""
    monkeypatch.setenv("YOCOLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "native", library.native.__wrapped__)
    return tmp_path / "cache"


@pytest.fixture
def one_small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    source = tmp_path / "src"
    source.mkdir()
    (source / "one.cpp").write_text('extern "C" int yo_one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCES", source)
    return source


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", ALL_X86, ["avx512-bf16", "avx512", "avx2"]),
        ("x86_64", ALL_X86 - {"avx512_bf16"}, ["avx512", "avx2"]),
        ("x86_64", ALL_X86 - {"avx512vl"}, ["avx2"]),
        ("x86_64", ALL_X86 - {"fma"}, []),
        ("amd64", ALL_X86, ["avx512-bf16", "avx512", "avx2"]),
        ("aarch64", frozenset({"asimd"}), ["neon"]),
        ("arm64", frozenset(), ["neon"]),
        ("riscv64", frozenset(), []),
    ],
)
def test_instruction_sets(machine: str, features: frozenset[str], expected: list[str]) -> None:
    assert build.supported(machine, features) == expected


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = library.native()
    assert found.handle is None
    assert found.reason == "no C++ compiler (g++, clang++, c++); install one, or set CXX"


def test_a_compiler_that_is_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX='no-such-compiler' is no program" in library.native().reason


def test_the_reason_is_logged(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, "yocolm.native"):
        library.native()
    assert len(caplog.records) == 1
    assert "native kernels are off: CXX='no-such-compiler'" in caplog.text


@pytest.mark.parametrize("value", ["0", "off", " OFF "])
def test_turned_off(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    monkeypatch.setenv(library.SWITCH, value)
    found = library.native()
    assert found.handle is None and found.reason == f"YOCOLM_NATIVE={value.strip().lower()}"
    assert not caplog.records and not fresh.exists()


@needs_compiler
@pytest.mark.parametrize("value", ["1", "on", " True", "auto", ""])
def test_turned_on(
    fresh: Path, one_small_source: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(library.SWITCH, value)
    assert library.native().isa == build.supported()[0]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("YOCOLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build.Path, "home", no_home)
    found = library.native()
    assert found.handle is None and found.reason.endswith("Set YOCOLM_CACHE to a folder")


def test_an_instruction_set_that_this_machine_lacks(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "supported", lambda: ["avx2"])
    monkeypatch.setenv(library.SWITCH, "avx512")
    assert library.native().reason == "YOCOLM_NATIVE=avx512 is not 0, 1 nor one of avx2"


def test_a_processor_without_kernels(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "supported", lambda: [])
    assert library.native().reason == "none are written for this processor"


@needs_compiler
def test_a_library_is_built_once(fresh: Path, one_small_source: Path) -> None:
    isa = build.supported()[0]
    first = build.build(isa)
    stamp = first.stat().st_mtime_ns
    assert build.build(isa) == first and first.stat().st_mtime_ns == stamp
    assert [path.name for path in fresh.iterdir()] == [first.name], "left-overs of the build"
    (one_small_source / "one.cpp").write_text('extern "C" int yo_one() { return 2; }\n')
    assert build.build(isa) != first


@needs_compiler
def test_sources_that_do_not_compile(fresh: Path, one_small_source: Path) -> None:
    (one_small_source / "two.cpp").write_text("int broken( {\n")
    found = library.native()
    assert found.handle is None and "error" in found.reason and "\n" not in found.reason
    assert not list(fresh.iterdir()), "left-overs of the build"


@needs_compiler
def test_a_cache_that_cannot_be_written(
    fresh: Path, one_small_source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("YOCOLM_CACHE", str(tmp_path / "file"))
    reason = library.native().reason
    assert "cannot write to" in reason and "set YOCOLM_CACHE" in reason


@needs_compiler
def test_builds_at_the_same_time(fresh: Path, one_small_source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from yocolm.ops.native import build;"
        "build.SOURCES = Path(sys.argv[1]); print(build.build(sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", code, str(one_small_source), build.supported()[0]]
    source_path = str(Path(build.__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": source_path}
    runs = [
        subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {run.communicate(timeout=100)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0] and len(paths) == 1
    assert [str(path) for path in fresh.iterdir()] == list(paths)


@needs_compiler
def test_the_library_has_no_thread_pool_of_its_own() -> None:
    found = library.native()
    if found.handle is None:
        pytest.skip(found.reason)
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    mapped = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in mapped if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_damaged_library_is_built_again(
    fresh: Path, one_small_source: Path, damage: bytes | None
) -> None:
    isa = build.supported()[0]
    path = build.build(isa)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert build.build(isa) == path and path.read_bytes()[:4] == whole[:4]
    assert library.native().handle is not None


@needs_compiler
def test_a_library_serves_without_a_compiler(
    fresh: Path, one_small_source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = build.build(build.supported()[0])
    (one_small_source / ".one.cpp.swp").write_bytes(b"\xff\xfe an editor's")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library.native().reason == str(made)


@needs_compiler
def test_a_compiler_with_arguments(
    fresh: Path, one_small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(name for name in build.COMPILERS if build.shutil.which(name))
    monkeypatch.setenv("CXX", f"{name} -DNOTHING")
    assert build.find_compiler()[1:] == ["-DNOTHING"]
    assert library.native().handle is not None


@needs_compiler
def test_what_killed_builds_left_is_removed(fresh: Path, one_small_source: Path) -> None:
    old, new = fresh / "build-old", fresh / "build-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    build.build(build.supported()[0])
    assert new.exists() and not old.exists()
