"""`POST /v1/chat/completions` and what comes of messages alone, `POST /v1/chat/completions/render`."""

from fastapi import APIRouter, Request, Response

from service.http.disconnect import unless_disconnected
from service.http.responses.bodies import encoded
from service.http.responses.respond import RESPONSES, respond
from service.http.routes.dependencies import Owner, ReadServices, WorkServices
from service.http.strict_json import StrictRoute
from service.requests.admission import check_model
from service.schemas.answers import ERRORS, WRONG_MODEL, ChatAnswer, RenderAnswer
from service.schemas.chat import ChatRequest, RenderRequest
from service.services import Services

router = APIRouter(tags=["chat"], route_class=StrictRoute)


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=RESPONSES | {202: RESPONSES[202] | {"model": ChatAnswer}})
async def create_chat_completion(body: ChatRequest, request: Request, services: WorkServices, owner: Owner) -> Response:
    """Answers messages, which the model's chat template turns into a prompt; else as a completion does.

    `tools` are shown to the model by the template; the text that it answers is not searched for calls of them.
    """
    return await respond(services, body, request, owner)


@router.post("/v1/chat/completions/render", response_model=RenderAnswer, responses=ERRORS | WRONG_MODEL)
async def render_chat(body: RenderRequest, request: Request, services: ReadServices, owner: Owner) -> Response:
    """The tokens that the same messages would be run as."""
    check_model(services, body.model)
    return await unless_disconnected(services.threads.tokens.run(owner, _rendered, services, body), request.receive)


def _rendered(services: Services, body: RenderRequest) -> Response:
    """On a thread to the last byte of the answer: it may be long."""
    ids = body.cut(services.prompt_maker.messages(body), services.limits.max_model_len)
    return Response(encoded({"token_ids": ids}), media_type="application/json")
