"""Which attention backend runs: resolved once, at start."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.attention.facade import AttentionBackend, AttentionNeeds
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.varlen import VarlenBackend
from engine.cache.spec import LayerKV
from engine.errors import ConfigError
from engine.native.kernels import Kernels


@dataclass(frozen=True)
class Candidate:
    """A backend that may be chosen."""

    name: str
    make: Callable[[torch.device], AttentionBackend]
    refusal: Callable[[AttentionNeeds], str | None]
    """Why it can't run, None where it can."""


def _never(needs: AttentionNeeds) -> None:
    """Runs on everything."""


def candidates_with(kernels: Kernels | None) -> tuple[Candidate, ...]:
    """In the order in which "auto" tries them; `kernels` are the CPU's, where there are any."""
    return (
        Candidate(VarlenBackend.name, VarlenBackend, VarlenBackend.refusal),
        Candidate(FlashInferBackend.name, FlashInferBackend, FlashInferBackend.refusal),
        Candidate(SdpaBackend.name, partial(SdpaBackend, kernels=kernels), _never),
    )


CANDIDATES = candidates_with(None)


@dataclass(frozen=True)
class Selection:
    """What was chosen."""

    backend: AttentionBackend
    block_size: int
    reason: str


def needs_of(
    layers: Iterable[LayerKV],
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None,
    *,
    soft_caps: bool = False,
    sinks: bool = False,
) -> AttentionNeeds:
    """`block_size` is what the operator asked for, None where that is left to the backend."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    kinds = set(layers)
    latent = any(kind.value_dim is not None for kind in kinds)
    return AttentionNeeds(device, capability, dtype, frozenset(kind.head_dim for kind in kinds), block_size, soft_caps, sinks, latent)


def select_backend(name: str, needs: AttentionNeeds, candidates: Sequence[Candidate] = CANDIDATES) -> Selection:
    """The backend called `name`; "auto" takes the first of the candidates that can run.

    Raises `ConfigError`, which says why, for a name that is unknown or can't run, and for a block size that no candidate takes.
    """
    if name == "auto":
        return _first(needs, candidates)
    by_name = {candidate.name: candidate for candidate in candidates}
    if name not in by_name:
        raise ConfigError(f"attention is {name!r}, but must be one of {', '.join(['auto', *sorted(by_name)])}")
    return _select(by_name[name], needs, "asked for")


def _first(needs: AttentionNeeds, candidates: Sequence[Candidate]) -> Selection:
    refusals: list[str] = []
    for candidate in candidates[:-1]:
        try:
            return _select(candidate, needs, "; ".join(refusals) or "the first choice")
        except ConfigError as error:
            refusals.append(str(error))
    return _select(candidates[-1], needs, "; ".join(refusals) or "the first choice")


def _select(candidate: Candidate, needs: AttentionNeeds, reason: str) -> Selection:
    why_not = candidate.refusal(needs)
    if why_not is not None:
        raise ConfigError(f"attention {candidate.name} can't run: {why_not}")
    backend = candidate.make(needs.device)
    block_size = backend.default_block_size if needs.block_size is None else needs.block_size
    backend.check_block_size(block_size)
    return Selection(backend, block_size, reason)
