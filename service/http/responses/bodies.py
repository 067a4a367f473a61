"""The bodies of completions: whole answers, chunks of streams, answers out of records."""

import json
from collections.abc import Sequence

from service.http.responses.shapes import shape_of
from service.registry.records import SaveRecord
from service.requests.admission import Plan
from service.requests.choice import Choice, Delta
from service.requests.generation import Generation
from service.saves.life import LiveSave, file_url
from service.services import Services
from service.text.choice_text import PromptReport
from service.text.prompts import PreparedPrompt
from service.wire import Json

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encoded(body: Json) -> bytes:
    return _ENCODER.encode(body).encode()


def envelope(services: Services, plan: Plan, created: int, choices: Sequence[Json], *, chunk: bool = False) -> Json:
    """What whole answers and chunks have in common."""
    shape = shape_of(plan.body)
    body: Json = {
        "id": f"{shape.id_prefix}{plan.request_id}",
        "object": shape.chunk_object if chunk else shape.whole_object,
        "created": created,
        "model": services.identity.name,
        "system_fingerprint": None,
        "choices": list(choices),
    }
    if len(choices) == 1 and "kv_transfer_params" in choices[0]:
        body["kv_transfer_params"] = choices[0]["kv_transfer_params"]
    return body


def full_response(services: Services, plan: Plan, generation: Generation) -> Json:
    choices = [_full_choice(plan, generation, choice) for choice in generation.choices]
    top = _top_fields(plan, generation.choices[0].prompt_logprobs)
    return envelope(services, plan, generation.created, choices) | top | {"usage": generation.usage()}


def _full_choice(plan: Plan, generation: Generation, choice: Choice) -> Json:
    result = generation.results[choice.index]
    body = shape_of(plan.body).whole(choice.index, result.text, result.logprobs, choice.finish_reason)
    body |= choice_fields(plan, choice.prompt, choice.token_ids, choice.stop_reason) | _own_logprobs(plan, choice.prompt_logprobs)
    return _with_transfer(body, choice.save)


def top_ids(plan: Plan) -> Json:
    """The prompt's tokens, null where they aren't asked for, of answers that have them at the top level."""
    if not shape_of(plan.body).prompt_at_top:
        return {}
    return {"prompt_token_ids": plan.prompts[0].token_ids if plan.body.return_token_ids else None}


def _top_fields(plan: Plan, prompt_logprobs: PromptReport | None) -> Json:
    """What is said of the prompt at the top level."""
    return top_ids(plan) | ({"prompt_logprobs": prompt_logprobs} if shape_of(plan.body).prompt_at_top else {})


def _own_logprobs(plan: Plan, prompt_logprobs: PromptReport | None) -> Json:
    """Those of the prompt, where they stand in each choice."""
    return {} if shape_of(plan.body).prompt_at_top else {"prompt_logprobs": prompt_logprobs}


def choice_fields(plan: Plan, prompt: PreparedPrompt | None, token_ids: Sequence[int] | None, stop_reason: str | int | None) -> Json:
    """vLLM's fields of a choice, null where there is nothing to say. `prompt`: None in all chunks but the first."""
    wanted = plan.body.return_token_ids
    body: Json = {"stop_reason": stop_reason, "token_ids": token_ids if wanted else None}
    if not shape_of(plan.body).prompt_at_top:
        body["prompt_token_ids"] = prompt.token_ids if wanted and prompt is not None else None
    return body


def accepted_response(services: Services, plan: Plan, generation: Generation) -> Json:
    """The answer to `wait: "accepted"`: nothing is known yet but where things will be."""
    choices = [_accepted_choice(plan, choice) for choice in generation.choices]
    return envelope(services, plan, generation.created, choices) | _top_fields(plan, None)


def _accepted_choice(plan: Plan, choice: Choice) -> Json:
    body = shape_of(plan.body).whole(choice.index, "", None, None)
    return _with_transfer(body | choice_fields(plan, choice.prompt, None, None) | _own_logprobs(plan, None), choice.save)


def first_chunk_choice(plan: Plan, choice: Choice) -> Json | None:
    """What a stream says of a choice before its first token; None where there is nothing to say."""
    shape = shape_of(plan.body)
    if choice.save is None and not plan.body.return_token_ids and not shape.always_opens:
        return None
    body = shape.opening(choice.index, "", None, None)
    return _with_transfer(body | choice_fields(plan, choice.prompt, [], None), choice.save)


def chunk_choice(plan: Plan, choice: Choice, delta: Delta, final: bool) -> Json:
    body = shape_of(plan.body).chunk(choice.index, delta.text, delta.logprobs, choice.finish_reason if final else None)
    body |= choice_fields(plan, None, delta.token_ids, choice.stop_reason if final else None)
    return _with_transfer(body, choice.save) if final else body


def _with_transfer(body: Json, save: LiveSave | None) -> Json:
    return body if save is None else body | {"kv_transfer_params": save.transfer()}


def replayed_response(services: Services, plan: Plan, records: Sequence[SaveRecord]) -> Json:
    """The answer to a repeated request, out of the records of the first one. For a stream its choices have the form of chunks."""
    choices = [_replayed_choice(services, plan, record) for record in records]
    outputs = [record.output for record in records if record.output]
    prompt_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
    completion_tokens = sum(len(output["token_ids"]) for output in outputs)
    usage: Json = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    usage |= {"total_tokens": prompt_tokens + completion_tokens}
    usage |= {"prompt_tokens_details": {"cached_tokens": _cached_tokens(plan, records)}}
    body = envelope(services, plan, int(records[0].created), choices, chunk=plan.body.stream)
    top = top_ids(plan) if plan.body.stream else _top_fields(plan, outputs[0].get("prompt_logprobs") if outputs else None)
    return body | top | {"usage": usage}


def _cached_tokens(plan: Plan, records: Sequence[SaveRecord]) -> int:
    """Prompts count once, however many choices they have."""
    by_prompt = {record.choice // plan.body.n: record.cached_tokens or 0 for record in records}
    return sum(by_prompt.values())


def _replayed_choice(services: Services, plan: Plan, record: SaveRecord) -> Json:
    output, shape = record.output or {}, shape_of(plan.body)
    make = shape.opening if plan.body.stream else shape.whole
    body = make(record.choice, output.get("text", ""), output.get("logprobs"), output.get("finish_reason"))
    prompt = plan.prompts[record.choice // plan.body.n]
    body |= choice_fields(plan, prompt, output.get("token_ids", []), output.get("stop_reason"))
    if not plan.body.stream:
        body |= _own_logprobs(plan, output.get("prompt_logprobs"))
    return body | {"kv_transfer_params": record_transfer(services, record)}


def record_transfer(services: Services, record: SaveRecord) -> Json:
    """`kv_transfer_params` of an answer out of a record."""
    body: Json = {
        "hidden_states_path": services.roots.to_client(record.hidden_states_path),
        "save_id": record.id,
        "status": record.status,
        "layers": list(record.layers),
        "dtype": record.dtype,
    }
    if record.status == "completed" and record.shape is not None:
        body |= {"num_tokens": record.num_tokens, "shape": list(record.shape), "bytes": record.bytes}
        body["url"] = file_url(record.id)
    return body
