"""From a valid body to a running generation: everything that can refuse a request before the engine hears of it."""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.errors import InvalidRequest
from engine.request import EngineRequest, SamplingParams
from engine.saves.bound import largest_file
from engine.saves.spec import SaveTarget
from engine.scheduling.limits import saved_rows
from service.errors import BadRequest, Conflict, ModelNotFound
from service.registry.records import GroupMode, GroupRecord
from service.requests.choice import Choice
from service.requests.extraction import (
    Extraction,
    check_against_prompt,
    file_metadata,
    new_record,
    new_save_id,
    resolve_extraction,
    save_spec,
)
from service.requests.generation import Generation
from service.requests.replay import Replay, check_body, join, read
from service.requests.sampling import (
    BadWords,
    Vocabulary,
    bad_word_tokens,
    check_kept_output,
    check_prompt_logprobs,
    check_sampling,
    check_something_is_left,
    sampling_params,
)
from service.requests.texts import choice_text, echoes, reports, stop_checker
from service.saves.groups import SaveGroup
from service.saves.life import LiveSave
from service.saves.space import Need
from service.saves.targets import ClaimedTarget
from service.schemas.fields import shown
from service.schemas.generation import GenerationRequest
from service.schemas.transfer import PREFIX
from service.services import Services
from service.text.choice_text import Echo
from service.text.prompts import PreparedPrompt, prepare_prompts

ATTEMPTS = 4
"""How often a repeated key waits for work that is just being given up, before it finds its own."""


@dataclass(frozen=True)
class Plan:
    """A body that has been checked against the model; nothing is held for it yet."""

    body: GenerationRequest
    request_id: str
    extraction: Extraction | None
    prompts: list[PreparedPrompt]
    echoes: list[Echo] | None
    """What stands before the texts, by prompt; None where nothing does."""
    bad_words: BadWords
    body_hash: str | None
    owner: str | None
    """Whom the request's API key stands for."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.body.n

    @property
    def idempotency_key(self) -> str | None:
        return None if self.extraction is None else self.extraction.params.idempotency_key

    @property
    def cache_salt(self) -> str:
        """Owners share no cached prefixes, so that none can find out another's prompts. No owner's name holds a NUL."""
        return self.body.cache_salt if self.owner is None else f"{self.owner}\0{self.body.cache_salt}"

    @property
    def wait(self) -> object:
        """true where nothing is saved: then there is only the text to wait for."""
        return True if self.extraction is None else self.extraction.params.wait


async def make_plan(
    services: Services,
    body: GenerationRequest,
    request_id: str,
    raw_body: Any,  # noqa: ANN401 - any JSON value
    owner: str | None,
) -> Plan:
    """Tokenizes and checks. Raises `ServiceError` or `InvalidRequest`."""
    check_model(services, body.model)
    _check_tokenizer(services, body)
    vocabulary = Vocabulary.of(services)
    check_sampling(body, vocabulary)
    extraction = resolve_extraction(body, services.settings.extract_by_default, services.default_layers, services.info)
    include_last_token = extraction is not None and extraction.params.include_last_token
    _check_count(body.num_prompts * body.n, services.settings.max_queued)
    texts = services.threads.texts
    prompts = await prepare_prompts(body, services.prompt_maker, include_last_token, partial(texts.run, owner))
    bad_words = await texts.run(owner, bad_word_tokens, body.bad_words, services.tokenizer) if body.bad_words else ()
    check_something_is_left(body, bad_words, vocabulary)
    check_prompt_logprobs(body, prompts, vocabulary, services.settings.prompt_logprobs_memory)
    if extraction is not None:
        _check_wait(extraction, body)
        for prompt in prompts:
            check_against_prompt(extraction, body, prompt)
    if _keeps_output(extraction):
        check_kept_output(body, prompts, vocabulary)
    echoed = await texts.run(owner, echoes, services.tokenizer, body, prompts) if body.echo else None
    has_key = extraction is not None and extraction.params.idempotency_key is not None
    body_hash = await services.threads.bodies.run(owner, _body_hash, raw_body) if has_key else None
    return Plan(body, request_id, extraction, prompts, echoed, bad_words, body_hash, owner)


def check_model(services: Services, model: str | None) -> None:
    """Raises `ModelNotFound` for any other name than the served one."""
    if model is not None and model != services.identity.name:
        raise ModelNotFound(f"the model {shown(model)} is not served here, only {services.identity.name!r} is", param="model")


def _check_tokenizer(services: Services, body: GenerationRequest) -> None:
    if services.tokenizer is None and body.stop:
        raise BadRequest("this model has no tokenizer: use stop_token_ids instead of stop", param="stop")


def _check_count(num_choices: int, max_queued: int) -> None:
    if num_choices > max_queued:
        raise BadRequest(f"prompt and n ask for {num_choices} choices, at most {max_queued} can be queued", param="n")


def _check_wait(extraction: Extraction, body: GenerationRequest) -> None:
    if extraction.params.wait == "accepted" and body.stream:
        raise InvalidRequest(f'{PREFIX}.wait "accepted" can\'t be streamed', f"{PREFIX}.wait")


def _body_hash(raw_body: Any) -> str:  # noqa: ANN401 - any JSON value
    """Of the body in one spelling. Piece by piece: written out at once, a large one would hold Python's lock all the time."""
    digest = hashlib.sha256()
    for piece in json.JSONEncoder(sort_keys=True, separators=(",", ":")).iterencode(raw_body):
        digest.update(piece.encode())
    return digest.hexdigest()


async def admit(services: Services, plan: Plan) -> Generation | Replay:
    """Starts a plan: claims its files, inserts its records, submits it; or finds that all that has been done before.

    Raises `ServiceError` or an `EngineError`; nothing is held and no record is left then. A caller that is cancelled meanwhile
    doesn't leave half of it behind: the admission goes on to its end and is given up there.
    """
    admission = asyncio.get_running_loop().create_task(_admit(services, plan))
    services.keep(admission)
    try:
        return await asyncio.shield(admission)
    except asyncio.CancelledError:
        admission.add_done_callback(_roll_back)
        raise


def _roll_back(admission: "asyncio.Task[Generation | Replay]") -> None:
    if not admission.cancelled() and admission.exception() is None:
        admission.result().leave()


async def _admit(services: Services, plan: Plan) -> Generation | Replay:
    if plan.idempotency_key is None:
        return await _start(services, plan)
    admission = services.idempotent_admission(plan.owner, plan.idempotency_key)
    for _ in range(ATTEMPTS):
        async with admission:
            stored = await asyncio.wrap_future(services.registry.find_group(plan.owner, plan.idempotency_key))
            if stored is None:
                return await _start(services, plan)
            check_body(stored, plan.body_hash)
            live = services.saver.find(stored.group.id)
            if live is None or not live.aborted:
                replay = join(live) if live is not None else await read(services, stored)
                if replay is not None:
                    return replay
                await asyncio.wrap_future(services.registry.release_key(stored.group.id))
                return await _start(services, plan)
        await live.until_ended()
    raise Conflict("requests with this idempotency key keep ending", param=f"{PREFIX}.idempotency_key")


async def _start(services: Services, plan: Plan) -> Generation:
    group = await _open_group(services, plan)
    submitted = False
    try:
        generation = _generation(services, plan, group)
        submitted = True
        generation.submit()
    except BaseException as error:
        if group is not None:
            if not submitted:
                _abandon([save.spec.target for save in group.saves])
            await services.saver.withdraw(group)
        raise _with_prefix(error)  # noqa: B904 - mostly the same error
    return generation


def _with_prefix(error: BaseException) -> BaseException:
    """The engine doesn't know that clients write these fields in an object."""
    if isinstance(error, InvalidRequest) and error.param in ("layers", "positions"):
        return InvalidRequest(str(error), f"{PREFIX}.{error.param}")
    return error


async def _open_group(services: Services, plan: Plan) -> SaveGroup | None:
    """Claims the targets and commits the records, of all choices or of none; None where nothing is to be saved."""
    extraction = plan.extraction
    if extraction is None:
        return None
    ids = [new_save_id() for _ in range(plan.num_choices)]
    claims = services.threads.disk(services.roots.root_of_client(extraction.params.hidden_states_path)).claims
    targets = await claims.run(plan.owner, _claim_all, services, plan, extraction, ids)
    saves = [_live_save(services, plan, extraction, index, ids[index], target) for index, target in enumerate(targets)]
    try:
        needs = [_need(services, plan, index, save, targets[index]) for index, save in enumerate(saves)]
        await services.space.reserve(needs, services.engine.save_bytes_written, partial(claims.run, plan.owner))
        return await services.saver.insert(_group_record(plan), saves)
    except BaseException:
        for save in saves:
            services.space.release(save.id)
        _abandon(targets)
        raise


def _group_record(plan: Plan) -> GroupRecord:
    mode: GroupMode = "independent" if plan.body.stream or plan.wait == "accepted" else "all_or_nothing"
    return GroupRecord(new_save_id(), plan.num_choices, mode, plan.owner, plan.idempotency_key, plan.body_hash)


def _need(services: Services, plan: Plan, index: int, save: LiveSave, target: ClaimedTarget) -> Need:
    """The most that the choice's file can take."""
    prompt = plan.prompts[index // plan.body.n]
    request = EngineRequest(save.id, prompt.token_ids, SamplingParams(max_tokens=prompt.max_tokens), save.spec)
    _, most_rows = saved_rows(request)
    return Need(save.id, target.directory_fd, largest_file(save.spec, services.info.model.hidden_size, most_rows))


def _claim_all(services: Services, plan: Plan, extraction: Extraction, ids: list[str]) -> list[ClaimedTarget]:
    params = extraction.params
    targets: list[ClaimedTarget] = []
    try:
        for save_id in ids:
            target = services.targets.claim(
                params.hidden_states_path,
                save_id,
                replace=params.on_conflict == "replace",
                directory_only=len(ids) > 1,
                client=plan.owner,
            )
            targets.append(target)
    except BaseException:
        _abandon(targets)
        raise
    return targets


def _abandon(targets: Sequence[SaveTarget]) -> None:
    for target in targets:
        target.abandoned()


def _live_save(services: Services, plan: Plan, extraction: Extraction, index: int, save_id: str, target: ClaimedTarget) -> LiveSave:
    metadata = file_metadata(extraction, services.info, services.identity, plan.request_id)
    record = new_record(extraction, save_id, target.path, plan.request_id, services.identity.name, index, plan.owner)
    if record.ttl_seconds is None:
        record = replace(record, ttl_seconds=services.settings.ttl_seconds)
    if _keeps_output(plan.extraction):
        record = replace(record, output={})
    spec = save_spec(extraction, save_id, target, metadata)
    awaits_text = _keeps_output(plan.extraction) or (plan.num_choices > 1 and not plan.body.stream)
    return LiveSave(record, spec, services.roots.to_client(target.path), awaits_text)


def _keeps_output(extraction: Extraction | None) -> bool:
    """Whether somebody may ask the record for the text."""
    return extraction is not None and (extraction.params.wait == "accepted" or extraction.params.idempotency_key is not None)


def _generation(services: Services, plan: Plan, group: SaveGroup | None) -> Generation:
    saves = [None] * plan.num_choices if group is None else group.saves
    choices = [_choice(services, plan, index, save) for index, save in enumerate(saves)]
    return Generation(
        services,
        choices,
        group,
        request_id=plan.request_id,
        keeps_output=_keeps_output(plan.extraction),
        keeps_results=_keeps_output(plan.extraction) or not plan.body.stream,
        owner=plan.owner,
    )


def _choice(services: Services, plan: Plan, index: int, save: LiveSave | None) -> Choice:
    body, which = plan.body, index // plan.body.n
    prompt, vocabulary = plan.prompts[which], Vocabulary.of(services)
    request = EngineRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt.token_ids,
        sampling=sampling_params(body, prompt.max_tokens, index % body.n, vocabulary, plan.bad_words),
        save=None if save is None else save.spec,
        priority=body.priority,
        cache_salt=plan.cache_salt,
        stop_checker=stop_checker(services.tokenizer, body, prompt),
        client_request_id=plan.request_id,
    )
    echo = None if plan.echoes is None else plan.echoes[which]
    reported, text = reports(services.tokenizer, body, vocabulary), choice_text(services.tokenizer, body, prompt)
    return Choice(index, prompt, request, save, reported, text, echo, waits_for_save=plan.wait is True)
