"""The bodies of completions: whole answers, chunks of streams, answers out of records."""

import json
from collections.abc import Sequence

from service.http.answers.shapes import shape_of
from service.registry.records import SaveRecord
from service.requests.admission import Plan
from service.requests.choice import Choice, Delta
from service.requests.generation import Generation
from service.saves.life import LiveSave, file_url
from service.services import Services
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
        "choices": list(choices),
    }
    if len(choices) == 1 and "kv_transfer_params" in choices[0]:
        body["kv_transfer_params"] = choices[0]["kv_transfer_params"]
    return body


def whole_answer(services: Services, plan: Plan, generation: Generation) -> Json:
    choices = [_whole_choice(plan, generation, choice) for choice in generation.choices]
    return envelope(services, plan, generation.created, choices) | top_ids(plan) | {"usage": generation.usage()}


def _whole_choice(plan: Plan, generation: Generation, choice: Choice) -> Json:
    result = generation.results[choice.index]
    body = shape_of(plan.body).whole(choice.index, result.text, result.logprobs, choice.finish_reason)
    return _with_transfer(body | choice_ids(plan, choice.prompt, choice.token_ids), choice.save)


def top_ids(plan: Plan) -> Json:
    """The prompt's tokens, where they are asked for and stand at the top level."""
    wanted = plan.body.return_token_ids and shape_of(plan.body).prompt_ids_at_top
    return {"prompt_token_ids": plan.prompts[0].token_ids} if wanted else {}


def choice_ids(plan: Plan, prompt: PreparedPrompt | None, token_ids: Sequence[int]) -> Json:
    """A choice's tokens, where they are asked for; those of the prompt unless it is None or they stand at the top level."""
    if not plan.body.return_token_ids:
        return {}
    if prompt is None or shape_of(plan.body).prompt_ids_at_top:
        return {"token_ids": token_ids}
    return {"prompt_token_ids": prompt.token_ids, "token_ids": token_ids}


def accepted_answer(services: Services, plan: Plan, generation: Generation) -> Json:
    """The answer to `wait: "accepted"`: nothing is known yet but where things will be."""
    shape = shape_of(plan.body)
    choices = [_with_transfer(shape.whole(choice.index, "", None, None), choice.save) for choice in generation.choices]
    return envelope(services, plan, generation.created, choices)


def first_chunk_choice(plan: Plan, choice: Choice) -> Json | None:
    """What a stream says of a choice before its first token; None where there is nothing to say."""
    shape = shape_of(plan.body)
    if choice.save is None and not plan.body.return_token_ids and not shape.always_opens:
        return None
    body = shape.opening(choice.index, "", None, None)
    return _with_transfer(body | choice_ids(plan, choice.prompt, []), choice.save)


def chunk_choice(plan: Plan, choice: Choice, delta: Delta, final: bool) -> Json:
    body = shape_of(plan.body).chunk(choice.index, delta.text, delta.logprobs, choice.finish_reason if final else None)
    body |= choice_ids(plan, None, delta.token_ids)
    return _with_transfer(body, choice.save) if final else body


def _with_transfer(body: Json, save: LiveSave | None) -> Json:
    return body if save is None else body | {"kv_transfer_params": save.transfer()}


def replayed_answer(services: Services, plan: Plan, records: Sequence[SaveRecord]) -> Json:
    """The answer to a repeated request, out of the records of the first one. For a stream its choices have the form of chunks."""
    choices = [_replayed_choice(services, plan, record) for record in records]
    outputs = [record.output for record in records if record.output]
    prompt_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
    completion_tokens = sum(len(output["token_ids"]) for output in outputs)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}
    body = envelope(services, plan, int(records[0].created), choices, chunk=plan.body.stream)
    return body | top_ids(plan) | {"usage": usage}


def _replayed_choice(services: Services, plan: Plan, record: SaveRecord) -> Json:
    output, shape = record.output or {}, shape_of(plan.body)
    make = shape.opening if plan.body.stream else shape.whole
    body = make(record.choice, output.get("text", ""), output.get("logprobs"), output.get("finish_reason"))
    body |= choice_ids(plan, plan.prompts[record.choice // plan.body.n], output.get("token_ids", []))
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
