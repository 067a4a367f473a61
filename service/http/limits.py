"""What clients may take of the HTTP side, each and all of them together. The engine has bounds of its own (`--max-queued`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """Bounds on connections, heads and bodies. Times are seconds, sizes bytes, rates bytes per second.

    The times are for slow networks, not for patience: waiting for an answer that isn't ready counts towards none of them.
    """

    body_bytes: int = 64 * 2**20
    """Of one request, whatever the context length: `service/http/body_bounds.py` has the bounds that follow from it."""
    all_bodies_bytes: int = 256 * 2**20
    """Of all requests together that are being read or answered; more are refused with 429."""
    json_depth: int = 64
    head_bytes: int = 64 * 2**10
    """Request line and headers."""
    head_count: int = 100
    """Header lines."""
    head_seconds: float = 20.0
    """From the first byte, or from the connection, to the end of the headers."""
    body_pause_seconds: float = 20.0
    """Without a single byte."""
    body_grace_seconds: float = 20.0
    """After which a body must have come at `body_rate` or faster."""
    body_rate: float = 10 * 2**10
    write_seconds: float = 30.0
    """In each of which a client must take some of what waits for it; less than the kernel has room for is not seen."""
    connections: int = 8192
    requests: int = 4096
    """That are being answered at one time, those of health checks left out."""


DEFAULT_LIMITS = HttpLimits()
MAX_BODY_BYTES = DEFAULT_LIMITS.body_bytes
