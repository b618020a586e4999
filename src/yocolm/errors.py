"""The exceptions that yocolm raises on purpose.

    YocolmError
    ├── ConfigError             a model, engine or training set-up that cannot be (ValueError)
    ├── CheckpointError         files that are missing, damaged or do not fit the model (ValueError)
    ├── RequestError            a bad prompt or sampling parameter (ValueError)
    ├── NumericsError           NaN or Inf in logits, losses or gradients (RuntimeError)
    └── MissingDependencyError  an optional package is not installed (ImportError)

Each message names the offending value, the limit it broke and the remedy.
"""


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
