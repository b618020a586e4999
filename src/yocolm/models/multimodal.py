"""Text models inside multimodal checkpoints: how their tensors are named there."""

from __future__ import annotations

import re
from collections.abc import Iterable

from yocolm.errors import CheckpointError

# Of images and sounds; older checkpoints have them outside of `model`.
_OTHER = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_embedder|audio_tower|embed_vision|embed_audio"
    r"|multi_modal_projector)\."
)
# Prefixes of the decoder and of its head, as three generations of transformers write them; of a
# decoder that was saved alone there are none.
_STYLES = (
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.", "lm_head."),
)
_OURS = _STYLES[-1]
_BARE = re.compile(r"(embed_tokens|per_layer_|altup_)\w*\.|(layers|norm)\.")


class Spelling:
    """Names of a text model's tensors (`model.`..., `lm_head.`...), and the checkpoint's for them.

    `names` maps the former to the latter, images' and sounds' tensors left out. Raises
    CheckpointError if two tensors mean the same one.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        kept = [name for name in names if not _OTHER.match(name)]
        self._style = next(
            (style for style in _STYLES if any(name.startswith(style[0]) for name in kept)), _OURS
        )
        self.names: dict[str, str] = {}
        for name in sorted(kept):
            ours = _ours(name)
            if ours in self.names:
                raise CheckpointError(
                    f"{where}: tensors {self.names[ours]} and {name} are the same part of the text "
                    "model; remove one"
                )
            self.names[ours] = name

    def of(self, name: str) -> str:
        """The checkpoint's spelling of a tensor, which it may lack."""
        for ours, theirs in zip(_OURS, self._style, strict=True):
            if name not in self.names and name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return self.names.get(name, name)


def _ours(name: str) -> str:
    if _BARE.match(name):
        return _OURS[0] + name
    for style in _STYLES:
        for ours, theirs in zip(_OURS, style, strict=True):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
    return name
