"""What a watch teaches the cost model, and when. Nothing else notices when it teaches nothing."""

from tiny import finish, greedy, make_engine, prompt_of
from yocolm.engine.watch import LEARN_EVERY


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
