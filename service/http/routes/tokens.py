"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

import asyncio

from fastapi import APIRouter, Request

from engine.errors import InvalidRequest
from service.http.routes.dependencies import ReadServices
from service.http.strict_json import StrictRoute, check_text
from service.requests.admission import check_model
from service.schemas.answers import ERRORS, WRONG_MODEL, DetokenizeAnswer, TokenizeAnswer, TokenizerInfo
from service.schemas.tokens import DetokenizeRequest, TokenizeRequest
from service.services import Services
from service.text.prompts import check_token_ids
from service.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"], route_class=StrictRoute)


@router.post("/tokenize", response_model=TokenizeAnswer, responses=ERRORS | WRONG_MODEL)
async def tokenize(body: TokenizeRequest, request: Request, services: ReadServices) -> dict[str, object]:
    """The tokens of a text, or of messages."""
    check_text(await request.body(), await request.json())
    check_model(services, body.model)
    ids = await asyncio.to_thread(_tokens, services, body)
    pieces = [_tokenizer(services).token_piece(token) for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": services.info.max_model_len, "tokens": ids, "token_strs": pieces}


@router.post("/detokenize", response_model=DetokenizeAnswer, responses=ERRORS | WRONG_MODEL)
async def detokenize(body: DetokenizeRequest, request: Request, services: ReadServices) -> DetokenizeAnswer:
    """The text of tokens, special ones included."""
    check_text(await request.body(), await request.json())
    check_model(services, body.model)
    check_token_ids("tokens", body.tokens, services.limits.vocab_size)
    tokenizer = _tokenizer(services)
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeAnswer(prompt=text)


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=ERRORS)
async def tokenizer_info(services: ReadServices) -> dict[str, object]:
    """The tokenizer's configuration, and the chat template in use."""
    tokenizer = _tokenizer(services)
    return {"tokenizer_class": None, **tokenizer.config, "chat_template": tokenizer.chat_template}


def _tokens(services: Services, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        return services.prompt_maker.messages(body)
    add_special_tokens = body.add_special_tokens is not False
    return _tokenizer(services).encode(body.prompt, add_special_tokens=add_special_tokens)


def _tokenizer(services: Services) -> Tokenizer:
    if services.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer")
    return services.tokenizer
