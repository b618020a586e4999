"""Models packed for serving: what they save, and how they become plain ones again."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tiny import FAMILIES, ONE_OF_EACH, fresh_model, packed_logits, prompt_of
from yocolm.models.layers import Linear, pack_weights
from yocolm.models.registry import build_model
from yocolm.ops.native import memory
from yocolm.ops.native.library import native

pytestmark = pytest.mark.skipif(native().handle is None, reason=native().reason)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_is_saved_as_it_was(name: str, dtype: str) -> None:
    plain, packed = fresh_model(name, dtype), fresh_model(name, dtype)
    pack_weights(packed)
    assert all(module.packed for module in packed.modules() if isinstance(module, Linear))
    expected, found = plain.state_dict(), packed.state_dict()
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        exact = torch.equal(found[key], value)
        assert exact or key.endswith("bias"), key  # biases are kept in float32
        torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_moving_and_casting_unpack(name: str) -> None:
    plain, packed = fresh_model(name), fresh_model(name)
    pack_weights(packed)
    other = copy.deepcopy(packed).double()
    assert not any(module.packed for module in other.modules() if isinstance(module, Linear))
    prompt = [prompt_of(9)]
    assert torch.equal(packed_logits(other, prompt), packed_logits(plain.double(), prompt))
    assert any(module.packed for module in packed.modules() if isinstance(module, Linear))


def test_a_packed_model_can_be_trained_again() -> None:
    model = fresh_model("gemma4")
    pack_weights(model)
    before = packed_logits(model, [prompt_of(5)])
    model.to("cpu")
    weights = [m.weight for m in model.modules() if isinstance(m, Linear)]
    assert weights and all(weight.requires_grad for weight in weights)
    torch.testing.assert_close(packed_logits(model, [prompt_of(5)]), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["retention", "window-grouped", "llama"])
def test_nothing_of_the_plain_weights_stays(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """A slab holds the whole model: a tensor that stayed in that of the plain weights kept all."""
    weights = sum(p.nbytes for p in build_model(FAMILIES[name], "cpu", dtype).parameters())
    monkeypatch.setattr(memory, "HUGE_PAGE", 4096)
    monkeypatch.setattr(memory, "SLAB", -(-3 * weights // 2 // 4096) * 4096)  # panels are padded
    monkeypatch.setattr(memory, "_slabs", memory.Slabs())
    model = build_model(FAMILIES[name], "cpu", dtype)
    pack_weights(model)
    held = tensors_of(model)
    assert weights <= sum(tensor.nbytes for tensor in held) <= memory.SLAB
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(storages.values()) <= 1.1 * memory.SLAB + 4096


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All that a model holds, packed or not."""
    packs = [m.packed for m in model.modules() if isinstance(m, Linear) and m.packed]
    packed = [part for pack in packs for part in (pack.data, pack.bias) if part is not None]
    return [*model.parameters(), *model.buffers(), *packed]
