"""Who computes what in the next step, and with which blocks and pages."""

from bisect import insort
from dataclasses import dataclass

from engine.cache.kv import BlockTables, KVCache
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.sequence import TokenSequence


@dataclass(slots=True)
class Chunk:
    """Positions `start … start + count - 1` of a sequence."""

    sequence: TokenSequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass
class StepPlan:
    """What has been given out for one step."""

    tokens_left: int
    capture_rows_left: int | None
    chunks: dict[TokenSequence, Chunk]
    starved: list[TokenSequence]
    """Running, but without a page for their next row."""
    preempted: bool = False


class Scheduler:
    """Holds every sequence that isn't done. Running ones keep blocks; waiting ones hold none, and pages only of rows to be kept."""

    def __init__(
        self,
        kv: KVCache,
        prefixes: PrefixFinder,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_mixed_tokens: int | None = None,
        max_capture_rows: int | None = None,
    ) -> None:
        """A step is of at most `max_batch_tokens`; of at most `max_mixed_tokens` (None: the same) where some sequence gets a single one,
        since whoever reads that sequence's text waits for all of the step."""
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self.num_preemptions = 0
        self._kv = kv
        self._prefixes = prefixes
        self._max_batch_tokens = max_batch_tokens
        self._batch_tokens = max_batch_tokens
        self._max_mixed_tokens = max_mixed_tokens or max_batch_tokens
        self._max_running = max_running
        self._max_capture_rows = max_capture_rows
        self._step = 0

    def add(self, sequence: TokenSequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: TokenSequence, *, keep_blocks: bool = False) -> None:
        """Forgets a sequence that is done or aborted and takes its blocks back, unless a step that is under way still uses them."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if not keep_blocks:
            self._kv.release(sequence.tables)

    def use_fewer_tokens(self, num_tokens: int) -> None:
        """A step of `num_tokens` has run out of memory: the next ones are at most half as large."""
        self._batch_tokens = max(1, min(self._batch_tokens, num_tokens) // 2)

    def use_more_tokens(self) -> None:
        """A step went well: steps grow slowly to their full size again, so that memory doesn't run out at every other one."""
        self._batch_tokens = min(self._max_batch_tokens, self._batch_tokens + 1 + self._max_batch_tokens // 128)

    def schedule(self) -> tuple[list[Chunk], list[TokenSequence]]:
        """The next step's chunks, and sequences that turned out to need no computation at all.

        Running sequences come first (their next tokens before long prompts), then waiting ones while tokens, blocks and pages last.
        """
        self._step += 1
        singles = [s for s in self.running if s.target - s.num_computed == 1]
        limit = min(self._batch_tokens, self._max_mixed_tokens) if singles else self._batch_tokens
        plan = StepPlan(limit, self._max_capture_rows, {}, [])
        for sequence, at_most in self._in_turn(singles, limit):
            if not plan.preempted or sequence in self.running:
                self._plan_chunk(plan, sequence, at_most)
        ready, blocked = ([], False) if plan.preempted else self._admit(plan)
        if blocked and plan.starved:
            self._preempt(plan, max(plan.starved, key=lambda s: s.order))
        return list(plan.chunks.values()), ready

    def schedule_ahead(self, sequences: list[TokenSequence]) -> list[Chunk] | None:
        """One further position of each of the sequences, whose step before is under way, before it is known which tokens that gave.

        None, and nothing given out, where others would have to take part in the next step, or where blocks or pages don't suffice.
        """
        room = len(self.running) < self._max_running
        if not sequences or (self.waiting and room) or len(sequences) > self._batch_tokens:
            return None
        rows_left = self._max_capture_rows
        for number, sequence in enumerate(sequences):
            start, capture = len(sequence.token_ids), sequence.capture
            if capture is not None:
                got_pages = capture.reserve(start, start + 1, start) > start
                rows_left = None if rows_left is None else rows_left - capture.num_rows_planned
                if not got_pages or (rows_left is not None and rows_left < 0):
                    self._give_up(sequences[: number + 1])
                    return None
            if self._kv.extend(sequence.tables, start, start + 1) == start:
                self._give_up(sequences[: number + 1])
                return None
        self._step += 1
        for sequence in sequences:
            sequence.last_step = self._step
        return [Chunk(sequence, len(sequence.token_ids), 1) for sequence in sequences]

    def _give_up(self, sequences: list[TokenSequence]) -> None:
        for sequence in sequences:
            if sequence.capture is not None:
                sequence.capture.clip(0)

    def _in_turn(self, singles: list[TokenSequence], limit: int) -> list[tuple[TokenSequence, int]]:
        """Running sequences with the tokens each may have at most.

        Single tokens first, those that have waited longest before the others, so that long prompts don't hold them up; but a quarter
        of the step is left to prompts, running or waiting, so that many single tokens don't hold those up either.
        """
        prompts = [s for s in self.running if s.target - s.num_computed > 1]
        singles.sort(key=lambda s: (s.last_step, s.order))
        prompts.sort(key=lambda s: s.order)
        startable = self.waiting and len(self.running) < self._max_running
        room = max(1, limit - max(1, limit // 4)) if prompts or startable else limit
        return [(s, 1) for s in singles[:room]] + [(s, limit) for s in prompts]

    def _plan_chunk(self, plan: StepPlan, sequence: TokenSequence, at_most: int) -> None:
        start = sequence.num_computed
        end = min(sequence.target, start + min(at_most, plan.tokens_left))
        capture = sequence.capture
        if end > start and capture is not None:
            end = capture.reserve(start, end, len(sequence.token_ids))
            if end == start:
                plan.starved.append(sequence)
            elif plan.capture_rows_left is not None:
                end = capture.limit_rows(end, plan.capture_rows_left)
        if end > start:
            end = self._take_blocks(plan, sequence, end)
        if capture is not None:
            capture.clip(end)
        if end > start:
            self._give_out(plan, Chunk(sequence, start, end - start))

    def _give_out(self, plan: StepPlan, chunk: Chunk) -> None:
        plan.chunks[chunk.sequence] = chunk
        plan.tokens_left -= chunk.count
        if plan.capture_rows_left is not None and chunk.sequence.capture is not None:
            plan.capture_rows_left -= chunk.sequence.capture.num_rows_planned
        chunk.sequence.last_step = self._step

    def _take_blocks(self, plan: StepPlan, sequence: TokenSequence, end: int) -> int:
        """Blocks for the sequence up to `end`, or as far as they go; the youngest running one pays where there are none at all."""
        start = sequence.num_computed
        while (reached := self._kv.extend(sequence.tables, start, end)) == start:
            victim = max(self.running, key=lambda s: s.order)
            assert victim is not sequence or len(self.running) > 1, "a sequence that is alone always fits"
            self._preempt(plan, victim)
            if victim is sequence:
                return start
        return reached

    def _preempt(self, plan: StepPlan, victim: TokenSequence) -> None:
        """Back to the waiting ones. Rows already captured go on to their file and aren't captured again."""
        chunk = plan.chunks.pop(victim, None)
        plan.tokens_left += chunk.count if chunk else 0
        plan.preempted = True
        self.num_preemptions += 1
        if victim.capture is not None:
            if chunk and plan.capture_rows_left is not None:
                plan.capture_rows_left += victim.capture.num_rows_planned
            victim.capture.clip(0)
            victim.capture.hand_over(victim.num_computed, everything=True)
        self.running.remove(victim)
        self._kv.release(victim.tables)
        victim.num_computed = 0
        self.add(victim)

    def _admit(self, plan: StepPlan) -> tuple[list[TokenSequence], bool]:
        """Starts waiting sequences in order. Those that lack pages are passed over, since others may need none.

        Returns sequences that need no computation, and whether one was stopped by a lack of KV blocks, or of a place among those that
        run although some of them are starved.
        """
        ready: list[TokenSequence] = []
        for sequence in list(self.waiting):
            full = len(self.running) >= self._max_running
            if plan.tokens_left <= 0 or (full and not plan.starved):
                break
            if sequence.capture is not None and not sequence.capture.can_start():
                continue
            if full:
                return ready, True
            if self._prefixes.answer_from_pages(sequence):
                ready.append(sequence)
                continue
            if not self._start(sequence):
                return ready, True
            if sequence.done:
                ready.append(sequence)
            else:
                self._plan_chunk(plan, sequence, self._batch_tokens)
        return ready, False

    def _start(self, sequence: TokenSequence) -> bool:
        length = self._prefixes.find(sequence)
        self._kv.adopt(sequence.tables, sequence.chains, length)
        if self.running and not self._kv.can_hold(sequence.tables, sequence.target, self._claims()):
            self._kv.release(sequence.tables)
            return False
        self._prefixes.start_at(sequence, length)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _claims(self) -> list[tuple[BlockTables, int]]:
        """What running prompts have yet to take."""
        return [(s.tables, s.target) for s in self.running if s.target - s.num_computed > 1]
