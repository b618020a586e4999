"""Weights in and out of Hugging Face folders.

The modules stack projections that share an input (q, k, v, ...) into one matrix; the files keep
them apart under the names that flash-linear-attention and transformers use. Reading goes tensor by
tensor from memory-mapped safetensors straight into the slices of the parameters, so that no second
copy of the model exists at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from yocolm.config import ModelConfig
from yocolm.errors import CheckpointError
from yocolm.fields import read_json, write_json
from yocolm.models.layouts import Shape, redundant_names, weight_layout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5_000_000_000

# Buffers that older versions of other libraries saved; they follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq", "rotary.inv_freq")

Read = Callable[[str], Tensor]
Piece = tuple[str, int, Callable[[], Tensor]]  # name in the file, bytes, and how to get it


def load_weights(
    model: nn.Module,
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Fills `model` from the safetensors of `folder`, sharded or not.

    Parameters must be allocated already, with `dtype` on `device`; tensors are cast while copied.
    A tied model may come with a redundant `lm_head.weight`, which is ignored.

    Raises:
        CheckpointError: naming missing, surplus or wrong-shape tensors, or a missing shard.
    """
    where = torch.device(device)
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype or parameter.device.type != where.type:
            raise CheckpointError(
                f"{name} is {parameter.dtype} on {parameter.device}; expected {dtype} on {device}"
            )
    with ExitStack() as stack:
        reader = _open_folder(Path(folder), stack)
        fill_weights(model, config, reader.shapes(), reader.read, where=str(folder))


def fill_weights(
    model: nn.Module,
    config: ModelConfig,
    shapes: Mapping[str, Shape],
    read: Read,
    where: str,
    spelled: Callable[[str], str] = str,
) -> None:
    """Copies tensors by file name into the model's parameters, after checking that all fit.

    `shapes` are those that exist, `read` returns one of them; `spelled` says how the checkpoint
    itself spells a name, for errors.
    """
    layout = weight_layout(config)
    check_tensors(config, shapes, where, spelled)
    parameters = dict(model.named_parameters())
    if parameters.keys() != layout.keys():
        raise CheckpointError(
            f"{type(model).__name__} does not have the parameters of its configuration: "
            f"{_listing(parameters.keys() ^ layout.keys())}"
        )
    with torch.no_grad():
        for name, parts in layout.items():
            start = 0
            for part in parts:
                stop = start + part.shape[0]
                if part.absent is not None and part.name not in shapes:
                    parameters[name][start:stop].fill_(part.absent)
                    continue
                tensor = read(part.name)
                if not tensor.is_floating_point():
                    raise CheckpointError(
                        f"{where}: tensor {spelled(part.name)} is {tensor.dtype}; weights must be "
                        "floating point (quantised checkpoints are not supported)"
                    )
                parameters[name][start:stop].copy_(tensor)
                start = stop


def check_tensors(
    config: ModelConfig,
    shapes: Mapping[str, Shape],
    where: str,
    spelled: Callable[[str], str] = str,
) -> None:
    """Raises CheckpointError naming missing, surplus and wrong-shape tensors, all at once."""
    parts = [part for parts in weight_layout(config).values() for part in parts]
    wanted = {part.name: part.shape for part in parts}
    needed = {part.name for part in parts if part.absent is None}
    surplus = shapes.keys() - wanted.keys() - redundant_names(config)
    surplus = {name for name in surplus if not name.endswith(_DERIVED)}
    wrong = [
        f"{spelled(name)} has shape {list(shapes[name])}, the configuration needs {list(shape)}"
        + (f" (is vocab_size {shapes[name][0]}?)" if shape[0] == config.vocab_size else "")
        for name, shape in wanted.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    problems = []
    if missing := needed - shapes.keys():
        problems.append(f"missing tensors: {_listing(map(spelled, missing))}")
    if surplus:
        problems.append(f"surplus tensors: {_listing(map(spelled, surplus))}")
    if wrong:
        problems.append(f"wrong shapes: {_listing(wrong)}")
    if problems:
        raise CheckpointError(f"{where} does not fit its configuration; " + "; ".join(problems))


def save_weights(
    model: nn.Module,
    folder: str | Path,
    config: ModelConfig | None = None,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a Hugging Face folder: safetensors (in shards above `max_shard_bytes`), config.json
    and generation_config.json. Weights keep the model's dtype.

    Args:
        config: taken from `model.config` when absent.
        generation_config: entries to add to the token ids in generation_config.json.
    """
    if config is None:
        config = getattr(model, "config", None)
        assert config is not None
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    pieces: list[Piece] = []
    for name, parts in weight_layout(config).items():
        tensors = parameters[name].split([part.shape[0] for part in parts])
        pieces.extend(
            (part.name, tensor.nbytes, partial(_detached, tensor))
            for part, tensor in zip(parts, tensors, strict=True)
        )
    dtype = next(iter(parameters.values())).dtype
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target, pieces, max_shard_bytes)
    write_configs(target, config, dtype, generation_config)


def write_tensors(folder: Path, pieces: Sequence[Piece], max_shard_bytes: int) -> None:
    """Writes tensors as one safetensors file or as indexed shards, one of them in memory."""
    shards: list[list[tuple[str, Callable[[], Tensor]]]] = []
    room = 0
    for name, size, get in pieces:
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append((name, get))
        room -= size
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, 1 + len(shards))
        ]
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: get() for name, get in shard}
        save_file(tensors, _partial(folder / file), metadata={"format": "pt"})
    # Only now, with everything on the disk: an earlier save's files would be read back.
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE_FILE):
        stale.unlink(missing_ok=True)
    (folder / INDEX_FILE).unlink(missing_ok=True)
    for file in names:
        os.replace(_partial(folder / file), folder / file)
    if len(shards) > 1:
        total = sum(size for _, size, _ in pieces)
        files = {name: file for file, shard in zip(names, shards, strict=True) for name, _ in shard}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_json(folder / INDEX_FILE, index)


def write_configs(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and generation_config.json."""
    fields = config.to_hf()
    fields["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", fields)
    ids = {
        name: fields[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if fields[name] is not None
    }
    write_json(folder / "generation_config.json", {**ids, **(generation_config or {})})


class _Folder:
    """Open safetensors files of one folder, and which of them holds which tensor."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = handles

    def shapes(self) -> dict[str, Shape]:
        return {
            name: tuple(handle.get_slice(name).get_shape())
            for name, handle in self._handles.items()
        }

    def read(self, name: str) -> Tensor:
        return self._handles[name].get_tensor(name)


def _open_folder(folder: Path, stack: ExitStack) -> _Folder:
    if (folder / SINGLE_FILE).exists():
        handle = _open_file(folder / SINGLE_FILE, stack)
        return _Folder({name: handle for name in handle.keys()})  # noqa: SIM118
    if not (folder / INDEX_FILE).exists():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = ""
        if pickled:
            hint = f"; {', '.join(pickled)} is pickled and not read: save it as safetensors"
        raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    index = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map")
    files = sorted(set(index.values()))
    if absent := [file for file in files if not (folder / file).exists()]:
        raise CheckpointError(
            f"{folder}: missing shard {', '.join(absent)}, named in {INDEX_FILE}; copy it there"
        )
    opened = {file: _open_file(folder / file, stack) for file in files}
    # The shards themselves say what they hold; a tensor that only the index knows is missing.
    handles = {name: handle for handle in opened.values() for name in handle.keys()}  # noqa: SIM118
    if unkept := index.keys() - handles.keys():
        raise CheckpointError(
            f"{folder}: tensors named in {INDEX_FILE} but absent from its shards: "
            f"{_listing(unkept)}"
        )
    return _Folder(handles)


def _open_file(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _detached(tensor: Tensor) -> Tensor:
    """A copy of its own: the file format refuses tensors that share memory, as slices do."""
    return tensor.to("cpu", copy=True).contiguous()


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _listing(names: Iterable[str], limit: int = 8) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
