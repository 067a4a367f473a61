"""`speculators train` on a machine without an accelerator. Run by the Python of the client's environment, with that command's options.

The trainer takes for granted that there is an accelerator: it moves model and batches to device number 0 and waits for it.
Both are replaced here, nothing else. The training losses are printed as one JSON line that begins with LOSSES.
"""

import json
import logging
import sys

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig


class Losses(logging.Filter):
    """Collects what the trainer reports of each step. A filter, since the trainer sets the handlers of its logger anew."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.values.append(record.msg["train"]["loss"])
        return True


def run(arguments: list[str]) -> list[float]:
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda: None
    losses = Losses()
    logging.getLogger("speculators.metrics").addFilter(losses)
    main(TrainConfig.resolve(arguments))
    return losses.values


if __name__ == "__main__":
    print("LOSSES", json.dumps(run(sys.argv[1:])))
