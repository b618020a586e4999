"""All that the ops cut into blocks, cut small."""

import pytest

from yocolm.engine import handles, recurrent
from yocolm.models import dense
from yocolm.ops import band_attention, block_attention, chunk_attention


def shrink_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut everything that the ops cut into blocks so small that a short prompt fills several."""
    monkeypatch.setattr(recurrent, "RETENTION_CHUNK", 4)
    monkeypatch.setattr(handles, "TOKEN_BLOCK", 3)
    monkeypatch.setattr(handles, "MANY_ROWS", 5)
    monkeypatch.setattr(chunk_attention, "ROWS", 4)
    monkeypatch.setattr(chunk_attention, "MASK_ELEMENTS", 32)
    monkeypatch.setattr(band_attention, "BAND_BLOCK", 3)
    monkeypatch.setattr(band_attention, "REACH_STEP", 2)
    monkeypatch.setattr(dense, "KEY_BLOCK", 3)
    monkeypatch.setattr(block_attention, "ROW_BLOCK", 4)
    monkeypatch.setattr(block_attention, "TILE_ELEMENTS", 512)
