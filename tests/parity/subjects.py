"""Checkpoints and prompts for the comparison with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.parity.conftest import CLASSES
from tests.parity.exact import in_float64
from tests.parity.ways import Subject, compute_known

NUM_RANDOM = 70
FAMILIES = tuple(CLASSES)

STORY = """The harbour master kept two ledgers. In the first he wrote what came in: grain from the south, timber, salt in grey
sacks, once a piano that nobody had ordered. In the second he wrote the weather, and it was the second that the town came to read.
On the ninth of March the glass fell all morning. By noon the gulls had gone inland, and the old men who mended nets on the quay
folded their stools without a word. "It will be a north-easter," said the pilot's daughter, who was eleven and had never been wrong.
The harbour master wet his pencil and looked at the sky, which was the colour of slate, and at the three boats that were still out.
He counted them again. Then he lit the lamp at the end of the mole, four hours early, wrote the hour beside it, and went to ring
the bell. Of what followed there is nothing in the first ledger. The second gives it one line, in a hand that is not quite steady."""


def tiny_subject(folder: Path, reference: PreTrainedModel, *, all_windowed: bool) -> Subject:
    """Three random prompts; the first two share 27 tokens, more than any of the tiny windows."""
    generator = torch.Generator().manual_seed(7)
    first, second, third = (torch.randint(3, 97, (length,), generator=generator).tolist() for length in (52, 22, 37))
    exact = in_float64(reference)
    return Subject(folder, [compute_known(reference, prompt, exact) for prompt in (first, first[:27] + second, third)], all_windowed)


def real_subject(folder: Path, *, lengths: Sequence[int], num_shared: int) -> Subject:
    """A real checkpoint with prompts of English text, two or more, the first two with `num_shared` tokens in common, and one of random ids:
    text hides rows that are badly conditioned.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = tokenizer.encode(STORY).ids
    token_ids = token_ids * (1 + sum(lengths) // len(token_ids))
    first = token_ids[: lengths[0]]
    second = first[:num_shared] + token_ids[lengths[0] : lengths[0] + lengths[1] - num_shared]
    others = [token_ids[20 : 20 + length] for length in lengths[2:]]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    random = torch.randint(0, tokenizer.get_vocab_size(), (NUM_RANDOM,), generator=torch.Generator().manual_seed(11)).tolist()
    exact = in_float64(reference)
    return Subject(folder, [compute_known(reference, prompt, exact) for prompt in (first, second, random, *others)])


def smollm2_subject(folder: Path) -> Subject:
    return real_subject(folder, lengths=(196, 150, 60), num_shared=90)
