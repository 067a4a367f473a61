"""How a request for a completion is answered, of whatever form its prompt and its answer are."""

import logging
from typing import Any

from fastapi import Request, Response

from service.http.disconnect import unless_disconnected
from service.http.responses.bodies import accepted_response, encoded, full_response, replayed_response
from service.http.responses.stream import CompletionStream, EventStream, replayed_events
from service.http.strict_json import StrictRequest
from service.observe.logs import lines_of_saves
from service.requests.admission import Plan, admit, make_plan
from service.requests.generation import Generation
from service.requests.replay import Replay
from service.schemas.answers import ERRORS, ErrorAnswer
from service.schemas.generation import GenerationRequest
from service.services import Services
from service.text.prompts import PreparedPrompt

log = logging.getLogger(__name__)

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    **ERRORS,
    202: {"description": 'Accepted, with `wait: "accepted"`: poll the save.'},
    403: {"model": ErrorAnswer, "description": "A path outside the allowed roots."},
    404: {"model": ErrorAnswer, "description": "Another model than the served one."},
    409: {"model": ErrorAnswer, "description": "The path exists or is in flight, or the idempotency key was used with another body."},
    410: {"model": ErrorAnswer, "description": "A part of what the idempotency key stands for was removed."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    429: {"model": ErrorAnswer, "description": "The queue is full; see Retry-After."},
    500: {"model": ErrorAnswer, "description": "The engine or a save failed; a failed save's id is in the body."},
    507: {"model": ErrorAnswer, "description": "The disk is full."},
}


async def respond(services: Services, body: GenerationRequest, request: Request, owner: str | None) -> Response:
    """Admits what a body asks for and answers it: whole, as a stream, at once, or out of the records of an earlier request."""
    request.state.request_id = body.request_id or request.state.request_id
    return await unless_disconnected(_respond(services, body, request, owner), request.receive)


async def _respond(services: Services, body: GenerationRequest, request: Request, owner: str | None) -> Response:
    """Of a request whose client is still there. Streams hear themselves when it leaves."""
    plan = await make_plan(services, body, request.state.request_id, StrictRequest.value_of(request), owner)
    started = await admit(services, plan)
    lines_of_saves(_save_ids(started))
    if services.settings.log_prompts:
        log.info("prompts", extra={"fields": {"prompts": [_logged_prompt(services, prompt) for prompt in plan.prompts]}})
    request.state.admitted = True
    if isinstance(started, Replay):
        services.metrics.request_ended("replayed")
        return await _replay(services, plan, started)
    if plan.wait == "accepted":
        services.start_in_background(started.finish())
        return _json(accepted_response(services, plan, started), 202)
    if body.stream:
        return EventStream(CompletionStream(services, plan, started).events(), started)
    return await _run(services, plan, started)


def _logged_prompt(services: Services, prompt: PreparedPrompt) -> str | list[int]:
    """A prompt for the log, as text where there is any."""
    if prompt.text is not None:
        return prompt.text
    return prompt.token_ids if services.tokenizer is None else services.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def _save_ids(started: Generation | Replay) -> list[str]:
    if isinstance(started, Replay):
        return [record.id for record in started.records]
    return [choice.save.id for choice in started.choices if choice.save is not None]


async def _run(services: Services, plan: Plan, generation: Generation) -> Response:
    """Runs to the end, unless the client leaves."""
    try:
        await generation.run()
        generation.close("completed")
        return _json(full_response(services, plan, generation))
    except Exception:
        generation.close("failed")
        raise
    finally:
        generation.leave()


async def _replay(services: Services, plan: Plan, replay: Replay) -> Response:
    """Answers out of the records of the first request with the key, waiting for as much of it as that request did."""
    try:
        if plan.wait == "accepted":
            return _json(replayed_response(services, plan, replay.records), 202)
        await replay.wait_until_done(texts_only=plan.wait is False)
        if not plan.body.stream:
            replay.check_whole()
            return _json(replayed_response(services, plan, replay.records))
        return EventStream(replayed_events(services, plan, replay.records), None)
    finally:
        replay.leave()


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(encoded(body), status, media_type="application/json")
