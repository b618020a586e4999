"""The exceptions that yocolm raises on purpose.

    YocolmError
    ├── ConfigError             a model, engine or training set-up that cannot be (ValueError)
    ├── CheckpointError         files that are missing, damaged or do not fit the model (ValueError)
    ├── RequestError            a bad prompt or sampling parameter (ValueError)
    ├── NumericsError           NaN or Inf in logits, losses or gradients (RuntimeError)
    └── MissingDependencyError  an optional package is not installed (ImportError)

Each message names the offending value, the limit it broke and the remedy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


class YocolmError(Exception):
    """Base of every error that yocolm raises for its users."""


class ConfigError(YocolmError, ValueError):
    """A configuration of a model, an engine or a training is inconsistent or not supported."""


class CheckpointError(YocolmError, ValueError):
    """Files of a model are missing, damaged, unsafe or do not fit its configuration."""


class RequestError(YocolmError, ValueError):
    """A prompt or a sampling parameter is out of range."""


class NumericsError(YocolmError, RuntimeError):
    """Logits, a loss or a gradient is not finite; in the engine only that request ends."""


class MissingDependencyError(YocolmError, ImportError):
    """An optional package is needed for what was asked."""


@contextmanager
def writing(what: object, remedy: str, kind: type[YocolmError] = CheckpointError) -> Iterator[None]:
    """While ``what`` is written, errors of the file system become a ``kind`` that names it.

    Those of safetensors and tokenizers are no OSErrors: they tell of the system's in their text.
    """
    try:
        yield
    except YocolmError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise kind(f"cannot write {what}: {reason}; {remedy}") from error


def _reason(error: Exception) -> str | None:
    """What the file system says; None for an error of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else os.strerror(int(found.group(1)))
