"""Outputs of the engine that nobody has taken yet, merged."""

from __future__ import annotations

from dataclasses import replace

from yocolm.engine.outputs import CompletionOutput, RequestOutput

Output = RequestOutput  # of what is new
_MERGE_AT = 256  # parts: bounds the memory of what a slow reader leaves lying


class Parts:
    """The parts of one request's answer, in order."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []

    def add(self, output: Output) -> None:
        self._outputs.append(output)
        if len(self._outputs) >= _MERGE_AT:
            self._outputs = [self.merged()]

    @property
    def error(self) -> str | None:
        return self._outputs[-1].error

    def merged(self) -> Output:
        """One output with all that is new."""
        if len(self._outputs) == 1:
            return self._outputs[0]
        return merge(self._outputs)


def merge(parts: list[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one."""
    samples: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        for sample in part.outputs:
            samples.setdefault(sample.index, []).append(sample)
    scored = (part.prompt_logprobs for part in parts if part.prompt_logprobs is not None)
    return replace(
        parts[-1],
        prompt_logprobs=next(scored, None),
        outputs=[_merge_samples(samples[index]) for index in sorted(samples)],
    )


def _merge_samples(parts: list[CompletionOutput]) -> CompletionOutput:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[entry for part in logprobs for entry in part] if logprobs else None,
    )
