"""`POST /v1/completions`."""

from fastapi import APIRouter, Request, Response

from service.http.responses.respond import RESPONSES, respond
from service.http.routes.dependencies import Owner, WorkServices
from service.http.strict_json import StrictRoute
from service.schemas.answers import CompletionAnswer
from service.schemas.completions import CompletionRequest

router = APIRouter(tags=["completions"], route_class=StrictRoute)


@router.post("/v1/completions", response_model=CompletionAnswer, responses=RESPONSES | {202: RESPONSES[202] | {"model": CompletionAnswer}})
async def create_completion(body: CompletionRequest, request: Request, services: WorkServices, owner: Owner) -> Response:
    """Completes a prompt and, with `kv_transfer_params`, saves hidden states. With `stream` the answer is server-sent events."""
    return await respond(services, body, request, owner)
