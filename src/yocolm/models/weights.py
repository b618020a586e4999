"""Weights in and out of Hugging Face folders.

The modules stack projections that share an input (q, k, v, ...) into one matrix; the files keep
them apart under the names that flash-linear-attention and transformers use. Reading goes piece by
piece from memory-mapped safetensors straight into the slices of the parameters, so that no second
copy of the model exists at any time, not even in the pages of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yocolm.config import GemmaConfig, ModelConfig
from yocolm.errors import CheckpointError, writing
from yocolm.fields import write_json
from yocolm.models.gemma import LookupTable
from yocolm.models.layouts import Shape, redundant_names, weight_layout
from yocolm.models.multimodal import Spelling
from yocolm.models.tensor_files import (
    REMEDY,
    Piece,
    TensorFiles,
    listing,
    open_folder,
    write_tensors,
)
from yocolm.tokenizer import SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

DEFAULT_SHARD_BYTES = 5_000_000_000
TRAINING_FILE = "training.json"  # what a training writes beside its model

# Buffers that older versions of other libraries saved; they follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq", "rotary.inv_freq")

Copy = Callable[[str, Tensor], None]
Progress = Callable[[int, int], None]  # bytes that are done, and in all


def load_weights(
    model: nn.Module,
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> None:
    """Fills `model` from the safetensors of `folder`, sharded or not.

    Parameters must be allocated already, with `dtype` on `device`; tensors are cast while copied.
    Lookup tables may be without memory (on the meta device): they are mapped from their file then,
    and keep its dtype. Of a multimodal checkpoint only the text model is read. Redundant tensors
    (a tied head, keys and values of layers that share others') are ignored.

    Raises:
        CheckpointError: naming missing, surplus or wrong-shape tensors, or a missing shard.
    """
    mapped = _check_allocation(model, dtype, torch.device(device))
    files, spelled = _text_files(Path(folder), config)
    shapes = {name: stored.shape for name, stored in files.tensors.items()}
    layout = weight_layout(config)
    names = [part.name for parts in layout.values() for part in parts if part.name in shapes]
    files.check_floats(names, str(folder))
    tables = {layout[name][0].name for name in mapped}
    total = sum(files.tensors[name].nbytes for name in names if name not in tables)
    done = 0

    def seen(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    def copy(name: str, target: Tensor) -> None:
        files.copy(name, target, seen)

    fill_weights(model, config, shapes, copy, str(folder), spelled, skip=mapped.keys())
    for name, table in mapped.items():
        table.map(*files.mapped(layout[name][0].name))


def _text_files(folder: Path, config: ModelConfig) -> tuple[TensorFiles, Callable[[str], str]]:
    """The text model's tensors under their plain names, and how the folder spells these."""
    files = open_folder(folder)
    if not isinstance(config, GemmaConfig):
        return files, str
    spelling = Spelling(files.tensors, str(folder))
    plain = {name: files.tensors[own] for name, own in spelling.names.items()}
    return TensorFiles(plain), spelling.of


def _check_allocation(
    model: nn.Module, dtype: torch.dtype, device: torch.device
) -> dict[str, LookupTable]:
    """The tables that are to be mapped, by the name of their weight; all else has memory."""
    tables = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LookupTable) and module.weight.is_meta
    }
    for name, parameter in model.named_parameters():
        fits = parameter.dtype == dtype and parameter.device.type == device.type
        if name not in tables and not fits:
            raise CheckpointError(
                f"{name} is {parameter.dtype} on {parameter.device}; expected {dtype} on {device}"
            )
    return tables


def fill_weights(
    model: nn.Module,
    config: ModelConfig,
    shapes: Mapping[str, Shape],
    copy: Copy,
    where: str,
    spelled: Callable[[str], str] = str,
    skip: Collection[str] = (),
) -> None:
    """Copies tensors by file name into the model's parameters, after checking that all fit.

    `shapes` are those that exist, `copy` copies one of them into a slice of a parameter; `spelled`
    says how the checkpoint itself spells a name, for errors. Parameters named in `skip` stay.
    """
    layout = weight_layout(config)
    check_tensors(config, shapes, where, spelled)
    parameters = dict(model.named_parameters())
    if parameters.keys() != layout.keys():
        raise CheckpointError(
            f"{type(model).__name__} does not have the parameters of its configuration: "
            f"{listing(parameters.keys() ^ layout.keys())}"
        )
    with torch.no_grad():
        for name, parts in layout.items():
            if name in skip:
                continue
            slices = parameters[name].split([part.shape[0] for part in parts])
            for part, target in zip(parts, slices, strict=True):
                if part.absent is not None and part.name not in shapes:
                    target.fill_(part.absent)
                else:
                    copy(part.name, target)


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
        problems.append(f"missing tensors: {listing(map(spelled, missing))}")
    if surplus:
        problems.append(f"surplus tensors: {listing(map(spelled, surplus))}")
    if wrong:
        problems.append(f"wrong shapes: {listing(wrong)}")
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
    and generation_config.json. Weights have the model's dtype, mapped tables too.

    Args:
        config: taken from `model.config` when absent.
        generation_config: entries to add to the token ids in generation_config.json.

    Raises CheckpointError where the file system does not take them.
    """
    if config is None:
        config = getattr(model, "config", None)
        assert config is not None
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dtype = next(iter(parameters.values())).dtype
    pieces: list[Piece] = []
    for name, parts in weight_layout(config).items():
        tensors = parameters[name].split([part.shape[0] for part in parts])
        pieces.extend(
            (part.name, tensor.numel() * dtype.itemsize, partial(_detached, tensor, dtype))
            for part, tensor in zip(parts, tensors, strict=True)
        )
    target = Path(folder)
    with writing(f"a model to {target}", REMEDY):
        target.mkdir(parents=True, exist_ok=True)
        write_tensors(target, pieces, max_shard_bytes)
        write_configs(target, config, dtype, generation_config)


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


def drop_text_files(folder: Path) -> None:
    """Remove what says how text becomes tokens, and how a model was trained: another model's, as
    soon as its weights in ``folder`` are replaced."""
    names = [TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, TRAINING_FILE]
    for name in (*names, "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    for pattern in ("chat_template.jinja", "*chat_templates/*.jinja"):
        for path in folder.glob(pattern):
            path.unlink()


def _detached(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of its own: the file format refuses tensors that share memory, as slices do."""
    return tensor.to("cpu", dtype, copy=True).contiguous()
