"""What a request may ask for, checked before anything is taken over for it."""

from dataclasses import dataclass

from engine.cache.kv import KVCache
from engine.capture.page_table import pages_reserved
from engine.errors import InvalidRequest, QueueFull
from engine.layers import depth_of
from engine.request import EngineRequest
from engine.sampling.prompt_logprobs import prompt_logprobs_bytes
from engine.saves.spec import SaveSpec


def saved_rows(request: EngineRequest) -> tuple[int, int]:
    """The least and the most rows that the request's save selects from: they are equal where nothing is generated or kept of it."""
    prompt, most = len(request.prompt_token_ids), request.sampling.max_tokens
    save = request.save
    if save is None or not most or not (save.include_output_tokens or save.include_last_token):
        return prompt, prompt
    last = int(save.include_last_token)
    return prompt + last, prompt + most - 1 + last


def num_fed(request: EngineRequest) -> int:
    """Positions that are fed to the model at most (contract section 2)."""
    last = request.save is not None and request.save.include_last_token and request.sampling.max_tokens > 0
    return len(request.prompt_token_ids) + max(0, request.sampling.max_tokens - 1) + last


@dataclass(frozen=True)
class RequestLimits:
    """Bounds that were fixed at start. A request that could never run is refused, whatever else is running."""

    num_layers: int
    vocab_size: int
    max_model_len: int
    kv: KVCache
    page_size: int
    num_pages: int
    max_capture_rows: int | None
    prompt_logprobs_memory: int | None = None
    """Bytes, for all requests together; None: no limit."""
    has_head: bool = True
    """False: the model has no LM head, so there is no text."""

    def prompt_logprobs_bytes(self, request: EngineRequest) -> int:
        """What the request takes of `prompt_logprobs_memory`."""
        return prompt_logprobs_bytes(len(request.prompt_token_ids), request.sampling, self.vocab_size)

    def check(self, request: EngineRequest) -> None:
        """Raises `InvalidRequest`."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        if not prompt:
            raise InvalidRequest("prompt must not be empty", "prompt")
        if max(prompt) >= self.vocab_size or min(prompt) < 0:
            raise InvalidRequest(f"prompt holds a token id outside 0 to {self.vocab_size - 1}", "prompt")
        if sampling.max_tokens < 0:
            raise InvalidRequest("max_tokens must be at least 0", "max_tokens")
        if not self.has_head and sampling.max_tokens:
            raise InvalidRequest("max_tokens must be 0: the model has no LM head, so it has hidden states but no text", "max_tokens")
        if not self.has_head and sampling.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs must be absent: the model has no LM head", "prompt_logprobs")
        fed = num_fed(request)
        if fed > self.max_model_len:
            raise InvalidRequest(
                f"prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} need {fed} positions, "
                f"the context holds {self.max_model_len}",
                "max_tokens",
            )
        if request.save is not None:
            self._check_save(request, request.save)
        depth = self.num_layers if request.save is None else depth_of(request.save.layers, self.num_layers)
        if not self.kv.fits(self.num_layers if sampling.max_tokens else depth, fed):
            raise InvalidRequest(f"{fed} positions don't fit the KV cache", "max_tokens")
        self._check_prompt_logprobs(request)

    def _check_prompt_logprobs(self, request: EngineRequest) -> None:
        bound, needed = self.prompt_logprobs_memory, self.prompt_logprobs_bytes(request)
        if bound is not None and needed > bound:
            raise InvalidRequest(
                f"prompt_logprobs {request.sampling.prompt_logprobs} of {len(request.prompt_token_ids)} tokens take {needed} bytes, "
                f"at most {bound} can be kept",
                "prompt_logprobs",
            )

    def _check_save(self, request: EngineRequest, save: SaveSpec) -> None:
        lowest, highest = saved_rows(request)
        save.rows.validate(highest if lowest == highest else None, "positions")
        num_layers = len(save.layers)
        if num_layers > self.num_pages:
            raise InvalidRequest(f"layers holds {num_layers} ids, the hidden-state cache has room for {self.num_pages}", "layers")
        reserved = pages_reserved(save.rows, num_layers, self.page_size, highest if lowest == highest else None, highest)
        if reserved > self.num_pages:
            raise InvalidRequest(
                f"positions counts {save.rows.lookback} rows from the end, which needs {reserved} pages of hidden states; "
                f"there are {self.num_pages}",
                "positions",
            )
        if self.max_capture_rows is not None and num_layers > self.max_capture_rows:
            raise InvalidRequest(f"layers holds {num_layers} ids, at most {self.max_capture_rows} can be captured", "layers")


class PromptLogprobsMemory:
    """The bytes that open requests hold for the log-probabilities of their prompts. Not thread-safe: the caller holds a lock."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[str, int] = {}
        self._used = 0

    def check(self, num_bytes: int) -> None:
        """Raises `QueueFull` where so many don't fit beside what is held."""
        if self._used + num_bytes > self._total:
            raise QueueFull(
                f"prompt log-probabilities of {num_bytes} bytes don't fit beside the {self._used} bytes that others hold; "
                f"there is room for {self._total}"
            )

    def reserve(self, request_id: str, num_bytes: int) -> None:
        """Takes what `check` let through."""
        self._held[request_id] = num_bytes
        self._used += num_bytes

    def release(self, request_id: str) -> None:
        """All that the request holds; nothing, where that is nothing."""
        self._used -= self._held.pop(request_id, 0)
