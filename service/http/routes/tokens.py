"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from fastapi import APIRouter, Request, Response

from engine.errors import InvalidRequest
from service.http.disconnect import unless_disconnected
from service.http.responses.bodies import encoded
from service.http.routes.dependencies import Owner, ReadServices
from service.http.strict_json import StrictRoute
from service.requests.admission import check_model
from service.schemas.answers import ERRORS, WRONG_MODEL, DetokenizeAnswer, TokenizeAnswer, TokenizerInfo
from service.schemas.tokens import DetokenizeRequest, TokenizeRequest
from service.services import Services
from service.text.prompts import check_token_ids
from service.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"], route_class=StrictRoute)


@router.post("/tokenize", response_model=TokenizeAnswer, responses=ERRORS | WRONG_MODEL)
async def tokenize(body: TokenizeRequest, request: Request, services: ReadServices, owner: Owner) -> Response:
    """The tokens of a text, or of messages."""
    check_model(services, body.model)
    return await unless_disconnected(services.threads.tokens.run(owner, _tokenized, services, body), request.receive)


@router.post("/detokenize", response_model=DetokenizeAnswer, responses=ERRORS | WRONG_MODEL)
async def detokenize(body: DetokenizeRequest, request: Request, services: ReadServices, owner: Owner) -> Response:
    """The text of tokens, special ones included."""
    check_model(services, body.model)
    return await unless_disconnected(services.threads.tokens.run(owner, _detokenized, services, body), request.receive)


def _tokenized(services: Services, body: TokenizeRequest) -> Response:
    """On a thread to the last byte of the answer: it may be long."""
    maker = services.prompt_maker
    ids = maker.messages(body) if body.prompt is None else maker.encode("prompt", body.prompt, body.add_special_tokens is not False)
    pieces = [_tokenizer(services).token_piece(token) for token in ids] if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": services.info.max_model_len, "tokens": ids, "token_strs": pieces}
    return Response(encoded(answer), media_type="application/json")


def _detokenized(services: Services, body: DetokenizeRequest) -> Response:
    check_token_ids("tokens", body.tokens, services.limits.vocab_size)
    text = _tokenizer(services).decode(body.tokens, skip_special_tokens=False)
    return Response(encoded({"prompt": text}), media_type="application/json")


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=ERRORS)
async def tokenizer_info(services: ReadServices) -> dict[str, object]:
    """The tokenizer's configuration, and the chat template in use."""
    tokenizer = _tokenizer(services)
    return {"tokenizer_class": None, **tokenizer.config, "chat_template": tokenizer.chat_template}


def _tokenizer(services: Services) -> Tokenizer:
    if services.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer")
    return services.tokenizer
