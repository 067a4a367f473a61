"""Gated short convolution (LFM2, arXiv 2511.23404, section 2)."""

from dataclasses import dataclass

import torch

from engine.cache.spec import LayerRecurrent, StatePart
from engine.models.base import ForwardBatch
from engine.models.blocks.decoder_config import DecoderConfig, ShortConvConfig
from engine.models.blocks.linear import Linear
from engine.models.blocks.ops import Ops
from engine.models.blocks.reader import WeightReader
from engine.models.blocks.recurrence import causal_conv
from engine.models.blocks.rope import RotaryAngles


@dataclass(frozen=True, slots=True)
class ShortConv:
    """c * conv(b * x) of one layer, without the product of its output."""

    cache: LayerRecurrent
    inputs: Linear  # [3 * width, width]: b, c, x
    conv: torch.Tensor  # [width, taps]
    bias: torch.Tensor | None  # [width]
    output: Linear  # [width, width]
    options: None = None
    recordable: bool = False

    def mix(self, layer: int, ops: Ops, normed: torch.Tensor, angles: RotaryAngles | None, batch: ForwardBatch) -> torch.Tensor:
        """`[rows, width]` of normed rows `[rows, width]`, which aren't written."""
        assert batch.recurrent is not None
        before, behind, rows = self.inputs(normed).chunk(3, dim=1)
        return causal_conv(batch.recurrent.rows_of(layer, len(normed)), 0, before * rows, self.conv, self.bias).mul_(behind)


def read_short_conv(reader: WeightReader, config: DecoderConfig, conv: ShortConvConfig, prefix: str) -> ShortConv:
    """Of the layer whose modules begin with `prefix`."""
    width = config.model.hidden_size
    return ShortConv(
        LayerRecurrent((StatePart((conv.num_taps - 1, width), reader.dtype),)),
        inputs=reader.linear([f"{prefix}.in_proj"], [3 * width], width, bias=conv.bias),
        conv=reader.tensor((width, 1, conv.num_taps), [f"{prefix}.conv.weight"]).squeeze(1),
        bias=reader.tensor((width,), [f"{prefix}.conv.bias"]) if conv.bias else None,
        output=reader.linear([f"{prefix}.out_proj"], [width], width, bias=conv.bias),
    )
