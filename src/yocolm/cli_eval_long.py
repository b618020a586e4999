"""`yocolm eval needle | multi-hop | multi-turn`: questions about long texts."""

from __future__ import annotations

import argparse

from yocolm.cli_eval import counter, show
from yocolm.engine.llm import LLM
from yocolm.eval.asking import Words, beyond_context, default_lengths, open_llm
from yocolm.eval.chains import TASKS, ChainPlan, chain_report, evaluate_chains
from yocolm.eval.haystack import Haystack
from yocolm.eval.needle import NeedlePlan, evaluate_needles, needle_report
from yocolm.eval.report import Report
from yocolm.eval.turns import TurnPlan, evaluate_turns, turn_report
from yocolm.tokenizer import Tokenizer


def run(arguments: argparse.Namespace) -> int:
    lengths = arguments.lengths or default_lengths(arguments.model)
    return show(_RUNS[arguments.kind](arguments, lengths), arguments)


def _needle(arguments: argparse.Namespace, lengths: list[int]) -> Report:
    plan = NeedlePlan(
        lengths,
        arguments.depths,
        arguments.needles,
        arguments.ask,
        arguments.jointly,
        arguments.runs,
        arguments.seed,
    )
    words = _words(arguments)
    llm, tokenizer = _open(arguments, lengths)
    haystack = Haystack.from_files(arguments.files, tokenizer)
    done = evaluate_needles(llm, tokenizer, haystack, plan, words, counter("questions"))
    notes = _notes(arguments, haystack, lengths)
    return needle_report(arguments.model, plan, words, *done, notes)


def _multi_hop(arguments: argparse.Namespace, lengths: list[int]) -> Report:
    plan = ChainPlan(
        lengths,
        TASKS if arguments.task == "all" else (arguments.task,),
        arguments.hops,
        arguments.chains,
        arguments.shuffle,
        arguments.runs,
        arguments.seed,
    )
    words = _words(arguments, link=arguments.link)
    llm, tokenizer = _open(arguments, lengths)
    haystack = Haystack.from_files(arguments.files, tokenizer)
    done = evaluate_chains(llm, tokenizer, haystack, plan, words, counter("questions"))
    notes = _notes(arguments, haystack, lengths)
    return chain_report(arguments.model, plan, words, *done, notes)


def _multi_turn(arguments: argparse.Namespace, lengths: list[int]) -> Report:
    plan = TurnPlan(
        lengths, arguments.turns, arguments.true_answers, arguments.runs, arguments.seed
    )
    words = _words(arguments)
    llm, tokenizer = _open(arguments, lengths)
    haystack = Haystack.from_files(arguments.files, tokenizer)
    done = evaluate_turns(llm, tokenizer, haystack, plan, words, counter("questions"))
    notes = _notes(arguments, haystack, lengths)
    return turn_report(arguments.model, plan, words, *done, notes)


def _words(arguments: argparse.Namespace, **own: str | None) -> Words:
    return Words.make(
        arguments.template,
        arguments.keys,
        arguments.digits,
        arguments.preamble,
        arguments.chat,
        arguments.max_tokens,
        needle=arguments.needle,
        question=arguments.question,
        cue=arguments.cue,
        **own,
    )


def _open(arguments: argparse.Namespace, lengths: list[int]) -> tuple[LLM, Tokenizer]:
    return open_llm(
        arguments.model,
        max(lengths),
        dtype=arguments.dtype,
        device=arguments.device,
        kv_memory=arguments.kv_memory,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        fast_prefill=arguments.fast_prefill,
    )


def _notes(arguments: argparse.Namespace, haystack: Haystack, lengths: list[int]) -> list[str]:
    notes, have = beyond_context(arguments.model, lengths), len(haystack.token_ids)
    if max(lengths) > have:
        notes.append(f"The text has {have:,} tokens and repeats in prompts that are longer.")
    return notes


_RUNS = {"needle": _needle, "multi-hop": _multi_hop, "multi-turn": _multi_turn}
