"""What readers find in their mailboxes: all that is new as one, errors, an end."""

import asyncio

import pytest

from serving import part
from yocolm.engine.outputs import CompletionOutput, RequestOutput
from yocolm.server.errors import ApiError, ClientGone
from yocolm.server.loop import Job, Mailbox
from yocolm.server.outputs import merge
from yocolm.server.stream import _good


def test_what_a_slow_reader_finds() -> None:
    """All of it, as one; and no more is kept than the text and the tokens."""

    async def main() -> None:
        box = Mailbox([Job("a", [1], None)])
        for number in range(1000):
            box.push(part("x", number, finished=number == 999))
        assert len(box._parts["a"]._outputs) < 300
        output = (await box.take())["a"]
        assert output.outputs[0].text == "x" * 1000 and output.finished and box.done
        assert output.outputs[0].token_ids == list(range(1000))
        assert output.outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_a_mailbox_that_was_given_up() -> None:
    async def main() -> None:
        box = Mailbox([Job("a", [1], None)])
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.fail(ClientGone())
        with pytest.raises(ClientGone):
            await reader
        with pytest.raises(ClientGone):
            await box.take_all()

    asyncio.run(main())


def test_the_error_of_one_prompt_ends_the_wait_for_all() -> None:
    async def main() -> None:
        box = Mailbox([Job("a", [1], None), Job("b", [1], None)])
        reader = asyncio.create_task(box.take_all())
        await asyncio.sleep(0)
        box.push(part("x", 1, finished=True))
        await asyncio.sleep(0)
        assert not reader.done()
        box.push(RequestOutput("a", None, [1], None, [], False, error="broken"))
        with pytest.raises(ApiError, match="broken"):
            await asyncio.wait_for(reader, 30)

    asyncio.run(main())


def test_what_was_drawn_before_an_error_is_streamed() -> None:
    """Merged with the error, where the reader is slow: tokens first, without a reason to end."""
    parts = [part("x", 1), part("y", 2)]
    ended = CompletionOutput(1, "", [], finish_reason="error")
    parts.append(RequestOutput("a", None, [1], None, [ended], True, error="broken"))
    good = _good(merge(parts))
    [sample] = good.outputs
    assert sample.text == "xy" and sample.token_ids == [1, 2] and sample.finish_reason is None
    assert _good(parts[0]) is parts[0]
