"""Which attention backend runs: resolved once, at start."""

import torch

from engine.attention.facade import AttentionBackend
from engine.attention.sdpa import SdpaBackend
from engine.errors import ConfigError

BACKENDS = ("auto", "sdpa")


def select_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest one that runs on `device`. Raises `ConfigError` for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(f"attention is {name!r}, but must be one of {', '.join(BACKENDS)}")
    return SdpaBackend(device)
