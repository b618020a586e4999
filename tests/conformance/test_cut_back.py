"""A step of several tokens of which only some are accepted, as a draft's verification leaves it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import DTYPES, FAMILIES, prompt_of, served_model
from tolerances import CROSS_PATH
from yocolm.engine.state import PagedState
from yocolm.models.base import Batch
from yocolm.models.spec import model_spec

PAGE, SLOTS = 4, 3
PROMPTS = (11, 3)  # of two sequences; windows wrap in the first
DRAFT, MORE = 5, 4


class Stepper:
    """Two sequences, advanced by hand."""

    def __init__(self, name: str, dtype: str) -> None:
        self.model: Any = served_model(name, dtype)
        spec = model_spec(FAMILIES[name])
        self.state = PagedState(spec, 1 + 2 * 8, PAGE, SLOTS, DTYPES[dtype])
        self.state.clear_slots([1, 2])
        self.done = [0, 0]

    @torch.inference_mode()
    def step(self, tokens: list[list[int]], accepted: list[int] | None = None) -> dict[int, Tensor]:
        """Run a step of those that have tokens, and keep ``accepted`` of these.

        Returns the logits of all tokens by sequence.
        """
        running = [seq for seq, part in enumerate(tokens) if part]
        counts = torch.tensor([len(tokens[seq]) for seq in running])
        starts = torch.tensor([self.done[seq] for seq in running])
        seq_ids = torch.repeat_interleave(counts)
        cu_seqlens = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        batch = Batch(
            tokens=torch.tensor([token for part in tokens for token in part]),
            positions=starts[seq_ids] + torch.arange(len(seq_ids)) - cu_seqlens[seq_ids],
            seq_ids=seq_ids,
            cu_seqlens=cu_seqlens,
            rows=torch.arange(len(seq_ids)),
            slots=torch.tensor(running) + 1,
            kv_lens=starts + counts,
            block_table=torch.arange(1, 17).view(2, 8)[running],
        )
        logits = self.model.logits(self.model(batch, self.state))
        kept = counts if accepted is None else torch.tensor(accepted)
        self.state.commit(None if accepted is None else kept)
        for seq, end in zip(running, (starts + kept).tolist(), strict=True):
            self.done[seq] = end
        return dict(zip(running, logits.split(counts.tolist()), strict=True))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_accepted_was_never_there(name: str, dtype: str) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate(PROMPTS)]
    drafts, more = ([prompt_of(n, s) for s in (7, 8)] for n in (DRAFT, MORE))
    for first, second in ((0, 5), (1, 0), (2, 4), (4, 1), (5, 3), (5, 5)):
        cut, plain = Stepper(name, dtype), Stepper(name, dtype)
        for stepper in (cut, plain):
            stepper.step(prompts)
        cut.step(drafts, [first, second])
        expected: list[list[Tensor]] = [[], []]
        for token in range(DRAFT + MORE):  # one token after another
            parts = [
                (draft[:kept] + rest)[token : token + 1]
                for draft, rest, kept in zip(drafts, more, (first, second), strict=True)
            ]
            for seq, logits in plain.step(parts).items() if any(parts) else ():
                expected[seq].append(logits[0])
        for seq, found in cut.step(more).items():
            gap = (found - torch.stack(expected[seq][-MORE:])).abs().max()
            assert float(gap) <= CROSS_PATH[dtype], (first, second, seq)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_discarded_step_leaves_slots_as_they_were(name: str) -> None:
    stepper = Stepper(name, "float32")
    stepper.step([prompt_of(9), prompt_of(6)])
    pools = [*(x for pair in stepper.state.rings for x in pair), *stepper.state.recurrent]
    before = [pool[1:].clone() for pool in pools]
    commit, stepper.state.commit = stepper.state.commit, lambda accepted=None: None
    stepper.step([prompt_of(5), prompt_of(4)])
    stepper.state.commit = commit
    stepper.state.discard()
    for pool, was in zip(pools, before, strict=True):
        assert torch.equal(pool[1:], was)
