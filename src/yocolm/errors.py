"""The exceptions that yocolm raises on purpose.

    YocolmError
    ├── ConfigError             a model configuration that cannot be built (also a ValueError)
    ├── CheckpointError         files that are missing, damaged or do not fit the model (ValueError)
    ├── RequestError            a bad prompt or sampling parameter (ValueError)
    ├── NumericsError           NaN or Inf in the logits of one request (RuntimeError)
    └── MissingDependencyError  an optional package is not installed (ImportError)

Each message names the offending value, the limit it broke and the remedy.
"""


class YocolmError(Exception):
    """Base of every error that yocolm raises for its users."""


class ConfigError(YocolmError, ValueError):
    """A model configuration is inconsistent, unknown or not supported."""


class CheckpointError(YocolmError, ValueError):
    """Files of a model are missing, damaged, unsafe or do not fit its configuration."""


class RequestError(YocolmError, ValueError):
    """A prompt or a sampling parameter is out of range."""


class NumericsError(YocolmError, RuntimeError):
    """The logits of one request are not finite; the other requests go on."""


class MissingDependencyError(YocolmError, ImportError):
    """An optional package is needed for what was asked."""
