"""From a body to the engine's sampling parameters."""

from engine.request import SamplingParams
from service.schemas.generation import GenerationRequest

SEED_RANGE = 2**64
LOWEST_SEED = -(2**63)


def sampling_params(body: GenerationRequest, max_tokens: int, choice: int) -> SamplingParams:
    """`choice` counts the choices of one prompt: each has a seed of its own, the first one the client's."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=None if body.seed is None else (body.seed + choice - LOWEST_SEED) % SEED_RANGE + LOWEST_SEED,
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_logprobs if body.echoes_prompt else None,
        logit_bias=body.logit_bias,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
    )
