"""What a watch teaches the cost model, and when. Nothing else notices when it teaches nothing."""

import math

from tiny import finish, greedy, make_engine, prompt_of
from yocolm.engine.watch import FARTHEST, FOLLOW, LEARN_EVERY, STRANGE


def observed(learns: bool, prompts: int, tokens: int) -> int:
    engine = make_engine("retention")
    engine.watch.learns = learns
    for i in range(prompts):
        engine.add_request(str(i), prompt_of(5 + i), greedy(tokens, prompt_logprobs=None))
    finish(engine)
    return engine.cost._observed


def test_steps_teach_while_it_learns_and_decodes_one_in_four() -> None:
    assert observed(False, 2, 9) == 0
    assert observed(True, 1, 1) == 1
    assert observed(True, 1, 1 + 3 * LEARN_EVERY) == 1 + 3


def test_answers_that_end_teach_their_length() -> None:
    engine = make_engine("retention")
    engine.watch.learns = True
    engine.add_request("a", prompt_of(5), greedy(9))
    finish(engine)
    assert engine.watch._forecaster.outputs._length == 9


def test_predictions_follow_what_first_tokens_take() -> None:
    """Everybody is twice as late as was predicted: soon less so, and no single one counts much."""
    engine = make_engine("retention")
    engine.watch.learns = True
    watch = engine.watch
    lateness: list[float] = []
    for _ in range(40):
        engine.add_request("one", prompt_of(5), greedy(2, prompt_logprobs=None))
        request = engine.scheduler.requests["one"]
        assert request.predicted_ttft is not None
        request.predicted_ttft = 0.5 * math.exp(watch._lateness)
        request.arrival -= 1.0  # it takes a second, and a little
        finish(engine)
        lateness.append(watch._lateness)
    assert 0 < lateness[0] <= FOLLOW * STRANGE
    assert lateness[-1] > 0.9 * FARTHEST and max(lateness) <= FARTHEST
