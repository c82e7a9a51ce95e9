"""Which fields of requests were ignored: a line of the log for each name, and a counter."""

import logging
from collections.abc import Iterable

from vllm_mp.client.stats import Cells, Counter
from vllm_mp.server.http.body.unknown_fields import RemovedField

logger = logging.getLogger(__name__)

OTHER = "other"
"""The label of all names that are not in `LABELS`."""
LABELS = (
    *("cache_control", "cache_prompt", "documents", "echo", "enable_thinking", "format", "grammar", "id", "images"),
    *("keep_alive", "max_thinking_tokens", "mirostat", "num_ctx", "num_predict", "options"),
    *("provider", "reasoning", "slot_id", "stream_options", "thinking", "think", "timestamp", "verbosity"),
    *("web_search_options", OTHER),
)
"""The names that the metric tells apart, so that no client can add labels: those that clients are known to send."""
_MAX_LOGGED = 200
"""Number of different fields that get a line in the log."""


class IgnoredFields:
    """The fields that a server process ignored."""

    def __init__(self, cells: Cells) -> None:
        self.counts = Counter(cells, LABELS)
        """Requests with an ignored field, by the name of the field."""
        self._logged: set[str] = set()

    def add(self, fields: Iterable[RemovedField]) -> None:
        """Count the fields of one request, and log those that were never ignored before."""
        for field in fields:
            self.counts.add(1, field.name if field.name in LABELS else OTHER)
            if field.path in self._logged or len(self._logged) > _MAX_LOGGED:
                continue
            self._logged.add(field.path)
            if len(self._logged) > _MAX_LOGGED:
                logger.warning("more than %d fields of requests were ignored; the others are not logged", _MAX_LOGGED)
            else:
                logger.warning(
                    "ignored the field %r of a request: %s (logged once; --strict-requests refuses such requests)",
                    field.path,
                    field.why,
                )
