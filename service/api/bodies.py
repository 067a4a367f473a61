"""The bodies of completions: whole answers, chunks of streams, answers out of records."""

import json
from collections.abc import Sequence
from typing import Any

from service.admission import Plan
from service.choice import Choice, Delta
from service.generation import Generation
from service.records import SaveRecord
from service.saving import LiveSave
from service.services import Services

Json = dict[str, Any]


def encoded(body: Json) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def envelope(services: Services, request_id: str, created: int, choices: Sequence[Json]) -> Json:
    """What whole answers and chunks have in common."""
    body: Json = {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": created,
        "model": services.identity.name,
        "choices": list(choices),
    }
    if len(choices) == 1 and "kv_transfer_params" in choices[0]:
        body["kv_transfer_params"] = choices[0]["kv_transfer_params"]
    return body


def whole_answer(services: Services, plan: Plan, generation: Generation) -> Json:
    choices = [_whole_choice(plan, generation, choice) for choice in generation.choices]
    return envelope(services, plan.request_id, generation.created, choices) | {"usage": generation.usage()}


def _whole_choice(plan: Plan, generation: Generation, choice: Choice) -> Json:
    result = generation.results[choice.index]
    body = _choice_body(choice.index, result.text, result.logprobs, choice.finish_reason)
    if plan.body.return_token_ids:
        body |= {"prompt_token_ids": choice.prompt.token_ids, "token_ids": choice.token_ids}
    return _with_transfer(body, choice.save)


def accepted_answer(services: Services, plan: Plan, generation: Generation) -> Json:
    """The answer to `wait: "accepted"`: nothing is known yet but where things will be."""
    choices = [_with_transfer(_choice_body(choice.index, "", None, None), choice.save) for choice in generation.choices]
    return envelope(services, plan.request_id, generation.created, choices)


def first_chunk_choice(plan: Plan, choice: Choice) -> Json | None:
    """What a stream says of a choice before its first token; None where there is nothing to say."""
    if choice.save is None and not plan.body.return_token_ids:
        return None
    body = _choice_body(choice.index, "", None, None)
    if plan.body.return_token_ids:
        body |= {"prompt_token_ids": choice.prompt.token_ids, "token_ids": []}
    return _with_transfer(body, choice.save)


def chunk_choice(plan: Plan, choice: Choice, delta: Delta, final: bool) -> Json:
    body = _choice_body(choice.index, delta.text, delta.logprobs, choice.finish_reason if final else None)
    if plan.body.return_token_ids:
        body["token_ids"] = delta.token_ids
    return _with_transfer(body, choice.save) if final else body


def _choice_body(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _with_transfer(body: Json, save: LiveSave | None) -> Json:
    return body if save is None else body | {"kv_transfer_params": save.transfer()}


def replayed_answer(services: Services, plan: Plan, records: Sequence[SaveRecord]) -> Json:
    """The answer to a repeated request, out of the records of the first one."""
    choices = [_replayed_choice(services, plan, record) for record in records]
    outputs = [record.output for record in records if record.output is not None]
    prompt_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
    completion_tokens = sum(len(output["token_ids"]) for output in outputs)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}
    return envelope(services, plan.request_id, int(records[0].created), choices) | {"usage": usage}


def _replayed_choice(services: Services, plan: Plan, record: SaveRecord) -> Json:
    output = record.output or {}
    body = _choice_body(record.choice, output.get("text", ""), output.get("logprobs"), output.get("finish_reason"))
    if plan.body.return_token_ids:
        prompt = plan.prompts[record.choice // plan.body.n]
        body |= {"prompt_token_ids": prompt.token_ids, "token_ids": output.get("token_ids", [])}
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
    return body
