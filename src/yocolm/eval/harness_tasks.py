"""Tasks of lm-evaluation-harness (the optional package `lm-eval`) run on a `TextModel`."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from yocolm.errors import MissingDependencyError, RequestError, YocolmError
from yocolm.eval.harness import TextModel

log = logging.getLogger("yocolm.eval")
_PACKAGE = "lm_eval"
PAPER = "paper"
PAPER_TASKS = (
    *("arc_challenge", "arc_easy", "boolq", "hellaswag"),
    *("openbookqa", "piqa", "winogrande", "sciq"),
)
_KEPT = (  # of what lm-eval returns; the rest says what the task files say
    *("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better"),
    *("n-samples",),
)


@dataclass(frozen=True)
class TaskOptions:
    """How tasks are run; names and defaults are lm-eval's.

    num_fewshot: examples before each question; None: as the task says.
    limit: documents of each task, or a share of them if below 1; None: all.
    gen_kwargs: generation arguments that replace the task's.
    chat: render contexts with the model's chat template.
    system_instruction: a text before every context.
    fewshot_as_multiturn: in a chat, every example is a turn of its own.
    use_cache: file of answers that are given again; those missing are added as they come.
    seed: of the examples that are drawn, and of numpy.
    random_seed: of Python's random numbers, which some tasks shuffle choices with.
    bootstrap_iters: resamplings for errors of metrics that have no formula.
    """

    num_fewshot: int | None = None
    limit: float | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True
    use_cache: Path | None = None
    seed: int = 1234
    random_seed: int = 0
    bootstrap_iters: int = 100_000


def evaluate(
    model: TextModel,
    tasks: Sequence[str],
    options: TaskOptions | None = None,
    *,
    include_path: Sequence[Path] = (),
    name: str = "",
    notice: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run tasks; returns lm-eval's ``results``, ``groups``, ``versions``, ``n-shot``,
    ``higher_is_better`` and ``n-samples``, and ``samples``: every document with its answers.

    Args:
        tasks: names that lm-eval or a file in ``include_path`` defines (tasks, groups, tags),
            ``"paper"`` for the eight of the YOCO paper, or task files.
        include_path: folders with task files; these go before lm-eval's own of the same name.
        name: of the model, for caches.
        notice: called with a line before what takes many seconds and shows nothing.

    Raises MissingDependencyError without lm-eval, RequestError for tasks that are unknown, cannot
    be loaded or ask for what the model cannot do.
    """
    options = options or TaskOptions()
    language_model = adapter(model, name)
    random.seed(options.random_seed)
    np.random.seed(options.seed)
    with _naming_packages():
        loaded = _load(tasks, include_path, notice)
        for task in loaded["tasks"].values():
            _check(task)
            _override(task, options)
        found = _run(language_model, loaded, options)
    return {
        **{key: found[key] for key in _KEPT if key in found},
        "samples": found.get("samples", {}),
    }


def _run(language_model: Any, loaded: dict[str, Any], options: TaskOptions) -> Any:
    """What lm-eval returns for tasks that are loaded."""
    if options.use_cache is not None:
        cached = _harness("api.model").CachingLM
        language_model = cached(language_model, str(options.use_cache))
    return _harness("evaluator").evaluate(
        lm=language_model,
        task_dict=loaded,
        limit=options.limit,
        bootstrap_iters=options.bootstrap_iters,
        log_samples=True,
        system_instruction=options.system_instruction,
        apply_chat_template=options.chat,
        fewshot_as_multiturn=options.chat and options.fewshot_as_multiturn,
    )


def adapter(model: TextModel, name: str = "") -> Any:
    """``model`` as an ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate(model=...)``.

    ``name`` stands for its tokenizer and template in lm-eval's cache of requests.
    """
    base: Any = _harness("api.model").LM

    class EngineLM(_Answers, base):
        pass

    return EngineLM(model, name)


class _Answers:
    """What lm-eval's ``LM`` leaves open: hands requests to a model, and answers to lm-eval's cache
    as they come."""

    cache_hook: Any

    def __init__(self, model: TextModel, name: str) -> None:
        super().__init__()
        self._model, self._name = model, name

    @property
    def tokenizer_name(self) -> str:
        return (self._name or "yocolm").replace("/", "__")

    @property
    def max_length(self) -> int:
        return self._model.max_length

    def loglikelihood(self, requests: Any) -> Any:
        pairs = [request.args for request in requests]
        return self._model.loglikelihood(
            pairs, lambda i, answer: self._keep("loglikelihood", pairs[i], answer)
        )

    def loglikelihood_rolling(self, requests: Any) -> Any:
        texts = [request.args[0] for request in requests]
        return self._model.loglikelihood_rolling(
            texts, lambda i, total: self._keep("loglikelihood_rolling", (texts[i],), total)
        )

    def generate_until(self, requests: Any) -> Any:
        asked = [request.args for request in requests]
        return self._model.generate_until(
            asked, lambda i, text: self._keep("generate_until", asked[i], text)
        )

    def _keep(self, what: str, arguments: Any, answer: Any) -> None:
        self.cache_hook.add_partial(what, arguments, answer)

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        return render(self._model, chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        wanted = chat_template if isinstance(chat_template, str) else "default"
        templates = self._model.llm.chat_template.templates
        return templates.get(wanted) if chat_template else None


def render(model: TextModel, history: Any, add_generation_prompt: bool = True) -> str:
    """A chat as a context, by the model's template; an open last message is left open.

    A system message that the template refuses is left out, with a warning.
    """
    options: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": not add_generation_prompt,
    }
    try:
        return model.llm.chat_template.render(history, **options)
    except RequestError:
        rest = [message for message in history if message.get("role") != "system"]
        if not rest or len(rest) == len(history):
            raise
        log.warning("the chat template refuses a system message: it is left out")
        return model.llm.chat_template.render(rest, **options)


def _harness(module: str) -> Any:
    """A module of lm-eval; MissingDependencyError where it is not installed."""
    with _naming_packages():
        return import_module(f"{_PACKAGE}.{module}")


@contextmanager
def _naming_packages() -> Iterator[None]:
    """What is not installed, in our words."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == _PACKAGE:
            raise MissingDependencyError(
                "tasks need lm-evaluation-harness: pip install lm-eval"
            ) from error
        raise MissingDependencyError(
            f"a task needs the package {error.name!r}, which is not installed: pip install it"
        ) from error


def _load(
    tasks: Sequence[str], include_path: Sequence[Path], notice: Callable[[str], None] | None
) -> dict[str, Any]:
    """lm-eval's dictionary of tasks and groups."""
    for folder in include_path:
        if not folder.is_dir():
            raise RequestError(f"--include-path {folder} is not a folder: give one with task files")
    names = [name for task in tasks for name in (PAPER_TASKS if task == PAPER else (task,))]
    if not names:
        raise RequestError("no tasks: name at least one, such as hellaswag, or `paper`")
    names = list(dict.fromkeys(names))
    manager = _manager(names, [str(folder) for folder in include_path], notice)
    try:
        return manager.load(names)
    except (YocolmError, ModuleNotFoundError):
        raise
    except OSError as error:  # what `datasets` and the hub raise derives from it
        raise RequestError(
            f"{_line(error)}: the data of {', '.join(names)} cannot be read. Without network, set "
            "HF_HOME to a cache that has it (and HF_HUB_OFFLINE=1, which spares the retries), or "
            "write a task file over local data (dataset_path: json) and name its folder with "
            "--include-path"
        ) from error
    except Exception as error:  # a task file may be wrong in any way
        raise RequestError(
            f"{', '.join(names)} cannot be loaded: {type(error).__name__}: {_line(error)}; correct "
            "the task file"
        ) from error


def _manager(names: Sequence[str], folders: list[str], notice: Callable[[str], None] | None) -> Any:
    """lm-eval's index of task files; its own 15,000 are read only where they are needed."""
    tasks = _harness("tasks")
    manager: Any = tasks.TaskManager(include_path=folders, include_defaults=False)
    files = {name for name in names if name.endswith((".yaml", ".yml"))}
    for name in files:
        if not Path(name).is_file():
            raise RequestError(f"task file {name} does not exist: give a file or a task's name")
    if all(name in manager.all_tasks or name in files for name in names):
        return manager
    if notice is not None:
        notice("reading lm-eval's index of tasks, which takes a while")
    manager = tasks.TaskManager(include_path=folders)
    for name in names:
        if name in manager.all_tasks or name in files:
            continue
        near = get_close_matches(name, manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise RequestError(
            f"task {name!r} is unknown: {hint}Name one of lm-eval's tasks, or one of a file in "
            "--include-path"
        )
    return manager


def _check(task: Any) -> None:
    """Refuse what lm-eval would refuse later, with a traceback."""
    if getattr(task, "UNSAFE_CODE", False):
        raise RequestError(
            f"task {task.task_name} runs code that the model writes: yocolm does not; use another"
        )
    if getattr(task, "MULTIMODAL", False):
        raise RequestError(
            f"task {task.task_name} needs images or sound: only text is supported; use another"
        )


def _override(task: Any, options: TaskOptions) -> None:
    """What the options set of a task. One that is set to 0 examples in its file keeps them."""
    if options.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(options.gen_kwargs), update=True)
    examples = task.get_config("num_fewshot")
    if options.num_fewshot is not None and examples != 0:
        task.set_config(key="num_fewshot", value=options.num_fewshot)
    elif examples is None:
        task.set_config(key="num_fewshot", value=0)
    elif options.num_fewshot:
        log.warning("task %s is set to no examples in its file: it gets none", task.task_name)
    task.set_fewshot_seed(seed=options.seed)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
