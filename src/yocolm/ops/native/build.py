"""Compiles the C++ sources for one instruction set, once: the result is kept in a cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("yocolm.native")
SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
# No -ffast-math: NaN and infinity must stay what they are.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")
FLAGS += ("-fno-trapping-math", "-fvisibility=default", "-Wno-psabi")
TIME_LIMIT = 300  # seconds for one source file
BUILDING = "build-"  # how folders of builds begin
STALE = 3600  # seconds after which nobody builds there any more


class BuildError(Exception):
    """Why there is no library: a line for the user."""


class InstructionSet(NamedTuple):
    """A target: the CPU features that it needs, as Linux names them, and the compiler's flags."""

    name: str
    machines: tuple[str, ...]
    features: frozenset[str]
    flags: tuple[str, ...]


_X86 = ("x86_64", "amd64")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
)
_AVX2_FEATURES = frozenset(("avx2", "fma", "f16c", "bmi2"))
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# The best first.
INSTRUCTION_SETS = (
    InstructionSet(
        "avx512-bf16", _X86, _AVX512_FEATURES | {"avx512_bf16"}, (*_AVX512, "-mavx512bf16")
    ),
    InstructionSet("avx512", _X86, _AVX512_FEATURES, _AVX512),
    InstructionSet("avx2", _X86, _AVX2_FEATURES, _AVX2),
    InstructionSet("neon", ("aarch64", "arm64"), frozenset(), ()),
)


def cpu_features() -> frozenset[str]:
    """Features of this machine's processor, as Linux names them; empty where unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _mac_features()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _mac_features() -> frozenset[str]:
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(answer.stdout.lower().replace("avx1.0", "avx").split())


def supported(machine: str | None = None, features: frozenset[str] | None = None) -> list[str]:
    """Names of the instruction sets that a machine (this one) has, the best first."""
    machine = platform.machine().lower() if machine is None else machine
    features = cpu_features() if features is None else features
    return [
        isa.name for isa in INSTRUCTION_SETS if machine in isa.machines and isa.features <= features
    ]


def cache_folder() -> Path:
    """Where compiled things are kept: ``YOCOLM_CACHE``, else the user's cache. BuildError."""
    own = os.environ.get("YOCOLM_CACHE")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "yocolm"
    except RuntimeError as error:  # a user without a home
        raise BuildError(f"no cache folder: {error} Set YOCOLM_CACHE to a folder") from error


def find_compiler() -> list[str]:
    """The command of a C++ compiler: ``CXX``, else the first of the usual names. BuildError."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for program, *arguments in [wanted] if wanted else [[name] for name in COMPILERS]:
        path = shutil.which(program)
        if path is not None:
            return [path, *arguments]
    if wanted:
        raise BuildError(f"CXX={' '.join(wanted)!r} is no program; set it to a C++ compiler")
    raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}); install one, or set CXX")


def build(isa_name: str) -> Path:
    """The library for an instruction set, compiled unless the cache has it. Raises BuildError."""
    isa = next(isa for isa in INSTRUCTION_SETS if isa.name == isa_name)
    target = cache_folder() / f"native-{isa.name}-{_digest(isa)}.so"
    try:
        if _is_whole(target):
            return target
        compiler = find_compiler()
        log.warning("compiling native kernels for %s, once for this machine", isa.name)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_broken_builds(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=BUILDING) as folder:
            _compile(compiler, isa, Path(folder), target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}; set YOCOLM_CACHE") from error
    return target


def _forget_broken_builds(cache: Path) -> None:
    """Remove what builds that were killed have left."""
    for folder in cache.glob(f"{BUILDING}*"):
        if time.time() - folder.stat().st_mtime > STALE:
            shutil.rmtree(folder, ignore_errors=True)


def _digest(isa: InstructionSet) -> str:
    """Changes with the sources and the flags."""
    digest = hashlib.sha256(" ".join((platform.machine(), *FLAGS, *isa.flags)).encode())
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _is_whole(library: Path) -> bool:
    """Whether a library is there, and as it was made: its last bytes are a digest of the others."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def _compile(compiler: list[str], isa: InstructionSet, folder: Path, target: Path) -> None:
    """Compile every source at once, link without an OpenMP of our own, and move into place."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{path.stem}.o" for path in sources]

    def one(source: Path, made: Path) -> None:
        _run([*compiler, *FLAGS, *isa.flags, "-c", str(source), "-o", str(made)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, sources, objects))
    finished = folder / "library.so"
    undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    _run([*compiler, "-shared", *undefined, *map(str, objects), "-o", str(finished)])
    content = finished.read_bytes()
    finished.write_bytes(content + hashlib.sha256(content).digest())
    os.replace(finished, target)  # two processes may build at once: the same file twice


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0]}")
