"""The model's self-check at start: the same prompt computed in two ways must give the same states, and states must be states.

It finds what no parity test of this code can: a kernel, a driver or a build of torch that computes wrongly here, and damaged weights.
"""

import torch

from engine.cache.kv import KVCache
from engine.errors import ConfigError
from engine.execution.runner import ModelRunner
from engine.execution.step_input import build_step
from engine.layers import LayerId
from engine.request import EngineRequest, SamplingParams
from engine.scheduling.plan import Chunk
from engine.scheduling.sequence import TokenSequence

_MOST_TOKENS = 24
_LEAST_TOKENS = 3
_EXACT, _TYPICAL = 1e-3, 0.05
"""Relative errors of rows in float32, and in half precision. The largest one counts in float32, but the median in half precision, and
where there are experts: two that a router likes alike may change places, and then the row is another one."""
_STRIDE, _OFFSET = 7919, 13
"""Token ids that are far apart in any vocabulary."""

States = dict[LayerId, torch.Tensor]


def check_model(
    runner: ModelRunner,
    kv: KVCache,
    *,
    num_layers: int,
    vocab_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    routes: bool = False,
) -> float:
    """The relative error of rows between the two ways: the largest, or the median in half precision and where the model `routes` rows to
    experts. Takes no block for longer than it lasts.

    Raises `ConfigError`, which says what is wrong, where the rows disagree, and where states aren't finite, are all zero, or all equal.
    """
    count = min(_MOST_TOKENS, max_model_len)
    if count < _LEAST_TOKENS:
        return 0.0
    prompt = tuple((_OFFSET + _STRIDE * place) % vocab_size for place in range(count))
    whole = _compute(runner, kv, prompt, num_layers, [count])
    parts = _compute(runner, kv, prompt, num_layers, [count // 3, count - 1, count])
    different = len(set(prompt)) > 1
    for layer, states in whole.items():
        _check_states(layer, states, different=different)
    errors = torch.cat([_errors(parts[layer], states) for layer, states in whole.items()])
    bound = _EXACT if dtype == torch.float32 else _TYPICAL
    largest = dtype == torch.float32 and not routes
    error = (errors.max() if largest else errors.median()).item()
    if not error <= bound:
        which = "a row differs" if largest else "the median row differs"
        raise ConfigError(
            f"the self-check failed: computed in parts, {which} by {error:.1e} from the same prompt computed at once (limit {bound:.0e})"
        )
    return error


@torch.inference_mode()
def _compute(runner: ModelRunner, kv: KVCache, prompt: tuple[int, ...], num_layers: int, ends: list[int]) -> States:
    """All layers' rows, `[tokens, width]` float32 on the host each, computed in chunks up to each of `ends`."""
    request = EngineRequest("self-check", prompt, SamplingParams(max_tokens=0))
    sequence = TokenSequence(request, 0, num_layers, list(prompt), {}, kv.new_tables(num_layers))
    start, parts = 0, []
    try:
        while start < len(prompt):
            wanted = next(end for end in ends if end > start)
            end = kv.extend(sequence.tables, start, wanted)
            if end == start:
                raise ConfigError(f"the self-check failed: the caches have no room for a prompt of {len(prompt)} tokens")
            chunk = Chunk(sequence, start, end, num_layers, samples=False, slots=kv.begin_chunk(sequence.tables, start))
            try:
                parts.append(runner.states(build_step([chunk], kv, num_layers, trim=False)))
            except BaseException:
                kv.withdraw_chunk(sequence.tables, chunk.slots, start)
                raise
            kv.commit_chunk(sequence.tables, chunk.slots, start)
            start = end
    finally:
        kv.release(sequence.tables)
    return {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}


def _check_states(layer: LayerId, states: torch.Tensor, *, different: bool) -> None:
    if not states.isfinite().all():
        raise ConfigError(f"the self-check failed: the states of layer {layer} are not finite")
    if not states.any():
        raise ConfigError(f"the self-check failed: the states of layer {layer} are all zero")
    if different and bool((states == states[0]).all()):
        raise ConfigError(f"the self-check failed: the states of layer {layer} are the same for every token")


def _errors(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Of each row, relative."""
    errors: torch.Tensor = (states.double() - others.double()).norm(dim=-1) / others.double().norm(dim=-1).clamp_min(1e-30)
    return errors
