"""Schedules the next step: the chunks of its sequences, with their blocks and pages."""

from bisect import insort
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import merge
from itertools import groupby

from engine.cache.kv import BlockTables, KVCache
from engine.capture.row_capture import CapturePlan
from engine.scheduling.pace import StepPace
from engine.scheduling.plan import Chunk, StepPlan
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.sequence import TokenSequence
from engine.scheduling.shares import even_shares


class Scheduler:
    """Holds every sequence that isn't done. Running ones keep blocks; waiting ones hold none, and pages only of rows to be kept.

    A chunk that was planned is in flight until `commit` or `withdraw`. Steps may be planned while others are in flight. Blocks that those
    read or write are given to nobody: windows are passed by what is computed, not by what is planned; a sequence that ends keeps its blocks
    until it has left flight; and nobody is preempted before.
    """

    def __init__(
        self,
        kv: KVCache,
        prefixes: PrefixFinder,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_capture_rows: int | None = None,
        inter_token_seconds: float = 0.0,
    ) -> None:
        """A step is of at most `max_batch_tokens`, and captures at most `max_capture_rows` (rows times layers; None: no limit).

        `inter_token_seconds`: how long a step may take in which some sequence generates; 0: no limit.
        """
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.num_preemptions = 0
        self._least_share = max([group.spec.block_size for group in kv.groups if not group.spec.is_recurrent], default=1)
        self.pace = StepPace(inter_token_seconds, at_least=self._least_share, at_most=max_batch_tokens)
        self._kv = kv
        self._prefixes = prefixes
        self._max_batch_tokens = max_batch_tokens
        self._token_budget = max_batch_tokens
        self._max_running = max_running
        self._max_capture_rows = max_capture_rows
        self._turn = 0
        """Of those that had one, counted."""
        self._turn_before_step = 0
        """A sequence with a later turn was part of the last step."""
        self._in_flight = 0
        """Chunks in flight."""
        self._stalled = False
        """Something has to be preempted, which must wait until nothing is in flight."""

    def add(self, sequence: TokenSequence) -> None:
        sequence.last_turn = self._turn
        insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: TokenSequence) -> None:
        """Forgets a sequence that is done or aborted. Blocks that a step in flight still uses go back when that has ended."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        sequence.ended = True
        if not sequence.num_in_flight:
            self._kv.release(sequence.tables)

    def shrink_token_budget(self, num_tokens: int) -> None:
        """A step of `num_tokens` has run out of memory: the next ones are at most half as large."""
        self._token_budget = max(1, min(self._token_budget, num_tokens) // 2)

    def grow_token_budget(self) -> None:
        """A step went well: steps grow slowly to their full size again, so that memory doesn't run out at every other one."""
        self._token_budget = min(self._max_batch_tokens, self._token_budget + 1 + self._max_batch_tokens // 128)

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step of these chunks took so long."""
        num_prompt_tokens = sum(chunk.count for chunk in chunks if chunk.count > 1)
        self.pace.observe(num_prompt_tokens, seconds, beside_text=any(chunk.count == 1 for chunk in chunks))

    def schedule(self) -> StepPlan:
        """The next step: single tokens first, then prompts, running and waiting ones, while tokens, blocks and pages last."""
        plan = StepPlan(self._token_budget, self._max_capture_rows)
        if self._in_flight and self._stalled:
            return plan
        self._stalled = False
        turn = self._turn
        singles: list[TokenSequence] = []
        prompts: list[TokenSequence] = []
        for sequence in self.running:
            remaining = sequence.remaining
            if remaining:
                (singles if remaining == 1 else prompts).append(sequence)
        if singles:
            self._plan_singles(plan, singles, beside_prompts=bool(prompts or self._can_start()))
        if not plan.preempted and not self._stalled:
            self._plan_prompts(plan, prompts)
        self._turn_before_step = turn
        return plan

    # The end of a planned chunk

    def commit(self, chunk: Chunk) -> bool:
        """The chunk has been computed. False: its sequence has ended meanwhile."""
        sequence = chunk.sequence
        self._kv.commit_chunk(sequence.tables, chunk.slots, chunk.start)
        self._end_flight(chunk)
        if sequence.ended:
            return False
        sequence.num_computed = chunk.end
        if not sequence.num_in_flight:
            sequence.num_planned = chunk.end
        if chunk.end >= sequence.tables.unregistered_end:
            self._prefixes.register(sequence, chunk.depth)
        return True

    def withdraw(self, chunk: Chunk) -> None:
        """The chunk, the latest of its sequence, won't be computed in its step."""
        sequence = chunk.sequence
        self._kv.withdraw_chunk(sequence.tables, chunk.slots, chunk.start)
        self._end_flight(chunk)
        if not sequence.ended:
            sequence.num_planned = chunk.start
            if sequence.capture is not None and chunk.rows is not None:
                sequence.capture.withdraw(chunk.rows)

    def shorten(self, chunk: Chunk, end: int) -> Chunk:
        """A chunk in flight, alone, that ends earlier after all: the rest is planned anew."""
        sequence = chunk.sequence
        sequence.num_unknown -= chunk.samples
        sequence.num_planned = end
        rows = None
        if sequence.capture is not None and chunk.rows is not None:
            rows = sequence.capture.shorten(chunk.rows, end)
        return Chunk(sequence, chunk.start, end, chunk.depth, samples=False, rows=rows, slots=chunk.slots)

    def _end_flight(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        self._in_flight -= 1
        sequence.num_in_flight -= 1
        sequence.num_unknown -= chunk.samples
        if sequence.ended and not sequence.num_in_flight:
            self._kv.release(sequence.tables)

    def _note_turns(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> None:
        """Those that are part of the step come last from now on, in the order in which they came now."""
        for sequence in sequences:
            if sequence in plan.chunks:
                self._turn += 1
                sequence.last_turn = self._turn

    # Single tokens

    def _plan_singles(self, plan: StepPlan, singles: list[TokenSequence], *, beside_prompts: bool) -> None:
        """Those that have waited longest before the others, so that long prompts don't hold them up; but a quarter of the step is left
        to prompts, running or waiting, so that many single tokens don't hold those up either."""
        singles.sort(key=_turn)
        limit = self._token_budget
        room = max(1, limit - max(1, limit // 4)) if beside_prompts else limit
        for sequence in singles[:room]:
            if self._stalled:
                break
            if not plan.preempted or sequence in self.running:
                self._plan_single(plan, sequence)
        self._note_turns(plan, singles[:room])
        if plan.chunks:
            plan.tokens_left = min(plan.tokens_left, self.pace.prompt_tokens)

    def _can_start(self) -> bool:
        return bool(self.waiting) and len(self.running) < self._max_running

    def _plan_single(self, plan: StepPlan, sequence: TokenSequence) -> None:
        start, capture, rows_left = sequence.num_planned, sequence.capture, plan.capture_rows_left
        if capture is not None and rows_left is not None and rows_left < len(capture.spec.layers):
            return
        if start >= sequence.tables.steady_end and self._allocate_blocks(plan, sequence, start + 1) == start:
            return
        rows = None
        if capture is not None:
            rows = capture.plan_row(start, len(sequence.token_ids))
            if rows is None:
                plan.starved.append(sequence)
                return
        self._schedule_chunk(plan, sequence, start + 1, rows)

    # Prompts

    def _plan_prompts(self, plan: StepPlan, prompts: list[TokenSequence]) -> None:
        """Better priorities come first; within a priority prompts, running or waiting, share the tokens that are left evenly."""
        admission = _Admission({s.arrival: s for s in self.running if self._is_advancing(s)} if self._can_start() else {})
        running = set(prompts)
        by_priority = merge(sorted(prompts, key=_priority_and_turn), list(self.waiting), key=_priority_and_turn)
        for _, candidates in groupby(by_priority, key=lambda s: s.request.priority):
            # What those leave who lack pages goes to the next ones.
            while self._has_budget(plan) and (sharers := self._select_prompts(plan, candidates, running, admission)):
                by_arrival = sorted(sharers, key=lambda s: s.order)
                shares = even_shares([s.remaining for s in by_arrival], plan.tokens_left)
                for sequence, share in zip(by_arrival, shares, strict=True):
                    if share and self._has_budget(plan):
                        self._plan_chunk(plan, sequence, share)
                self._note_turns(plan, sharers)
        if admission.closed and plan.starved and not plan.preempted:
            self._preempt_starved(plan)

    def _has_budget(self, plan: StepPlan) -> bool:
        return plan.tokens_left > 0 and not plan.preempted and not self._stalled

    def _select_prompts(
        self, plan: StepPlan, candidates: Iterator[TokenSequence], running: Set[TokenSequence], admission: "_Admission"
    ) -> list[TokenSequence]:
        """As many as get a quarter of a step or all that they need, in turn; those that aren't `running` are started."""
        quantum, promised = max(self._least_share, plan.tokens_left // 4), 0
        sharers: list[TokenSequence] = []
        while promised < plan.tokens_left and (sequence := next(candidates, None)) is not None:
            if sequence not in running and not self._admit(plan, sequence, admission):
                continue
            if sequence.remaining:
                sharers.append(sequence)
                promised += min(quantum, sequence.remaining)
        return sharers

    def _admit(self, plan: StepPlan, sequence: TokenSequence, admission: "_Admission") -> bool:
        """Starts a waiting sequence, if it can be; those that lack pages are passed over, since others may need none."""
        if admission.closed:
            return False
        capture = sequence.capture
        if capture is not None and (not capture.can_start() or (admission.pages_awaited and not capture.pages.in_use)):
            admission.pages_awaited = True
            return False
        if len(self.running) >= self._max_running or self._is_blocked(sequence):
            admission.closed = True
            return False
        if self._awaits_shared_prefix(sequence, admission):
            return False
        if self._prefixes.finish_from_cache(sequence):
            plan.ready.append(sequence)
            return False
        if not self._start(sequence):
            admission.closed = True
            return False
        admission.advancing[sequence.arrival] = sequence
        if sequence.done:
            plan.ready.append(sequence)
        return True

    def _awaits_shared_prefix(self, sequence: TokenSequence, admission: "_Admission") -> bool:
        """Whether a prompt that runs is at a block that the sequence begins with, too. Of which one that is true is remembered."""
        arrival, end = sequence.awaited
        known = admission.advancing.get(arrival)
        if known is not None and known.num_computed < end:
            return True
        for running in admission.advancing.values():
            if _may_wait_for(running, sequence):
                end = self._prefixes.awaited_end(running, sequence)
                if running.num_computed < end:
                    sequence.awaited = running.arrival, end
                    return True
        return False

    def _is_advancing(self, sequence: TokenSequence) -> bool:
        """Whether the sequence is a prompt that the last step takes further, or has taken."""
        return sequence.last_turn > self._turn_before_step and max(sequence.remaining, sequence.num_planned - sequence.num_computed) > 1

    def _start(self, sequence: TokenSequence) -> bool:
        length = self._prefixes.find(sequence)
        self._kv.adopt(sequence.tables, sequence.chains, length)
        if self.running and not self._kv.can_hold(sequence.tables, sequence.target, self._claims()):
            self._kv.release(sequence.tables)
            sequence.blocked_by = self._headroom()
            return False
        sequence.blocked_by = None
        self._prefixes.start_at(sequence, length)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _is_blocked(self, sequence: TokenSequence) -> bool:
        """Whether nothing has come free since the sequence was found to lack blocks: the search for its prefix isn't repeated before."""
        if sequence.blocked_by is None or not self.running:
            return False
        return all(now <= then for now, then in zip(self._headroom(), sequence.blocked_by, strict=True))

    def _headroom(self) -> tuple[int, ...]:
        """Per group: blocks beside those that running prompts have yet to take."""
        return self._kv.headroom(self._claims())

    def _claims(self) -> list[tuple[BlockTables, int]]:
        """What running prompts have yet to take."""
        return [(s.tables, s.target) for s in self.running if s.target - s.num_planned > 1]

    # Chunks

    def _plan_chunk(self, plan: StepPlan, sequence: TokenSequence, at_most: int) -> None:
        """As many positions as rows, pages and blocks allow; blocks and pages are taken for those only."""
        start = sequence.num_planned
        end = start + min(at_most, sequence.remaining, plan.tokens_left)
        capture = sequence.capture
        if capture is not None and end > start:
            end = capture.limit(start, end, sequence.num_sure, plan.capture_rows_left)
            if end == start and (plan.capture_rows_left is None or plan.capture_rows_left >= len(capture.spec.layers)):
                plan.starved.append(sequence)
        if end > start:
            end = self._allocate_blocks(plan, sequence, end)
        if end > start:
            self._schedule_chunk(plan, sequence, end, None if capture is None else capture.plan(start, end, sequence.num_sure))

    def _schedule_chunk(self, plan: StepPlan, sequence: TokenSequence, end: int, rows: CapturePlan | None) -> None:
        slots = self._kv.begin_chunk(sequence.tables, sequence.num_planned) if self._kv.has_recurrent else ()
        chunk = Chunk(sequence, sequence.num_planned, end, sequence.run_depth, sequence.samples(end), rows, slots)
        sequence.num_planned = end
        sequence.num_unknown += chunk.samples
        sequence.num_in_flight += 1
        self._in_flight += 1
        plan.chunks[sequence] = chunk
        plan.tokens_left -= chunk.count
        if plan.capture_rows_left is not None and sequence.capture is not None and rows is not None:
            plan.capture_rows_left -= rows.num_rows * len(sequence.capture.spec.layers)

    def _allocate_blocks(self, plan: StepPlan, sequence: TokenSequence, end: int) -> int:
        """Blocks for the sequence up to `end`, or as far as they go; the youngest running one is preempted where there are none at all."""
        start = sequence.num_planned
        while (reached := self._kv.extend(sequence.tables, start, end, sequence.num_computed)) == start:
            if self._kv.drop_passed((s.tables, s.num_computed) for s in self.running):
                continue
            if self._in_flight > len(plan.chunks):
                self._stalled = True
                return start
            victim = max(self.running, key=lambda s: s.order)
            assert victim is not sequence or len(self.running) > 1, "a sequence that is alone always fits"
            self._preempt(plan, victim)
            if victim is sequence:
                return start
        return reached

    def _preempt_starved(self, plan: StepPlan) -> None:
        """The youngest that waits for pages gives its blocks, or its place among those that run, to one that needs no pages."""
        victim = max(plan.starved, key=lambda s: s.order)
        if self._in_flight > len(plan.chunks):
            self._stalled = True
        else:
            self._preempt(plan, victim)

    def _preempt(self, plan: StepPlan, victim: TokenSequence) -> None:
        """Back to the waiting ones. Rows already captured go on to their file and aren't captured again."""
        chunk = plan.chunks.pop(victim, None)
        if chunk is not None:
            self.withdraw(chunk)  # what it had of the step's tokens and rows is given to nobody else
        assert not victim.num_in_flight
        plan.preempted = True
        self.num_preemptions += 1
        if victim.capture is not None:
            victim.capture.pause()
        self.running.remove(victim)
        self._kv.release(victim.tables)
        victim.num_computed = victim.num_planned = 0
        self.add(victim)


@dataclass
class _Admission:
    """How far a step has come with starting those that wait."""

    advancing: dict[int, TokenSequence]
    """By arrival: prompts that the last step took further, or that this one has started."""
    pages_awaited: bool = False
    """One that lacks pages was passed over: nobody behind it begins to use pages, so what comes free is kept for it. Those that were
    preempted with pages go on, since they release them."""
    closed: bool = False
    """Blocks, or places among those that run, have run out: no other sequence is started."""


def _may_wait_for(running: TokenSequence, waiting: TokenSequence) -> bool:
    """Whether a prompt may wait for one that runs: none waits for one of a worse priority."""
    return running.request.priority <= waiting.request.priority


def _turn(sequence: TokenSequence) -> tuple[int, tuple[int, int]]:
    return sequence.last_turn, sequence.order


def _priority_and_turn(sequence: TokenSequence) -> tuple[int, int, tuple[int, int]]:
    return sequence.request.priority, *_turn(sequence)
