"""Log lines with fields: readable, or one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
import time

_PLAIN = frozenset(vars(logging.makeLogRecord({})))


class Formatter(logging.Formatter):
    """Time, level, message and the extra fields of a record."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            name: value
            for name, value in vars(record).items()
            if name not in _PLAIN and name not in ("message", "color_message", "taskName")
        }
        message = record.getMessage()
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp += f".{int(record.msecs):03d}Z"
        level = record.levelname.lower()
        if self._as_json:
            line = {"time": stamp, "level": level, "logger": record.name, "message": message}
            return json.dumps({**line, **fields}, default=str)
        trace = fields.pop("trace", None)
        extra = "".join(f" {name}={value}" for name, value in fields.items())
        return f"{stamp} {level}: {message}{extra}" + (f"\n{trace}" if trace else "")


def configure(level: str, form: str) -> None:
    """Send all logs of the server to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(form == "json"))
    for name in ("yocolm", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
