"""How much of prompts a step takes beside text that is being generated: as much as the time between two tokens allows."""


class StepPace:
    """A client that streams a text waits for the whole step, so a step beside text is sized by time, from the rate that the last steps had.

    The estimate is the number of prompt tokens that would have filled the time: it shrinks at once and grows by halves.
    """

    def __init__(self, seconds: float, *, at_least: int, at_most: int) -> None:
        """`seconds` a step beside text may take, 0: no limit; `at_least` and `at_most` tokens of prompts in such a step."""
        self._seconds = seconds
        self._at_least = min(at_least, at_most)
        self._at_most = at_most
        self._alone: float | None = None
        self._beside_text: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of the next step beside text."""
        if not self._seconds:
            return self._at_most
        estimate = self._beside_text or self._alone or self._at_most / 4
        return max(self._at_least, min(self._at_most, int(estimate)))

    def observe(self, num_prompt_tokens: int, seconds: float, *, beside_text: bool) -> None:
        """A step took so long."""
        if not num_prompt_tokens or seconds <= 0:
            return
        fitting = num_prompt_tokens * self._seconds / seconds
        if not beside_text:
            self._alone = fitting
        elif seconds > self._seconds or 2 * num_prompt_tokens >= self.prompt_tokens:  # else it is the text that took the time
            known = self._beside_text
            self._beside_text = fitting if known is None or fitting < known else (known + fitting) / 2
