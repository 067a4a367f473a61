"""`POST /v1/chat/completions` and what comes of messages alone, `POST /v1/chat/completions/render`."""

import asyncio

from fastapi import APIRouter, Request, Response

from service.http.answers.answering import RESPONSES, answer
from service.http.routes.dependencies import Owner, ReadServices, WorkServices
from service.http.strict_json import StrictRoute, check_text
from service.requests.admission import check_model
from service.schemas.answers import ERRORS, WRONG_MODEL, ChatAnswer, RenderAnswer
from service.schemas.chat import ChatRequest, RenderRequest

router = APIRouter(tags=["chat"], route_class=StrictRoute)


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=RESPONSES | {202: RESPONSES[202] | {"model": ChatAnswer}})
async def create_chat_completion(body: ChatRequest, request: Request, services: WorkServices, owner: Owner) -> Response:
    """Answers messages, which the model's chat template turns into a prompt; else as a completion does.

    `tools` are shown to the model by the template; the text that it answers is not searched for calls of them.
    """
    return await answer(services, body, request, owner)


@router.post("/v1/chat/completions/render", response_model=RenderAnswer, responses=ERRORS | WRONG_MODEL)
async def render_chat(body: RenderRequest, request: Request, services: ReadServices) -> RenderAnswer:
    """The tokens that the same messages would be run as."""
    check_text(await request.body(), await request.json())
    check_model(services, body.model)
    ids = await asyncio.to_thread(services.prompt_maker.messages, body)
    return RenderAnswer(token_ids=body.cut(ids, services.limits.max_model_len))
