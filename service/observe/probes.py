"""The routes that probes and scrapers ask again and again: they need no key, make no spans, and are logged at debug level."""

PROBE_PATHS = frozenset({"/health", "/health/live", "/metrics", "/ping", "/version"})
