"""Mamba 2 (arXiv 2405.21060): a state space whose step sizes, inputs and outputs depend on the rows."""

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from engine.cache.spec import LayerRecurrent, StatePart
from engine.models.base import ForwardBatch
from engine.models.blocks.decoder_config import DecoderConfig, MambaConfig
from engine.models.blocks.linear import Linear
from engine.models.blocks.ops import Ops
from engine.models.blocks.reader import WeightReader
from engine.models.blocks.recurrence import causal_conv, state_space
from engine.models.blocks.rope import RotaryAngles


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Of one layer, without the product of its output. Heads of a group share what writes to their states and what reads them."""

    config: MambaConfig
    cache: LayerRecurrent
    inputs: Linear  # [2 * inner + 2 * groups * state_dim + heads, width]: gate, rows, writes, reads, steps
    conv: torch.Tensor  # [inner + 2 * groups * state_dim, taps]
    conv_bias: torch.Tensor | None
    log_decay: torch.Tensor  # [heads] float32
    step_bias: torch.Tensor  # [heads] float32
    skip: torch.Tensor  # [heads] float32, of the rows that go past the states
    norm: torch.Tensor  # [inner]
    norm_eps: float
    output: Linear  # [width, inner]
    options: None = None
    recordable: bool = False

    def mix(self, layer: int, ops: Ops, normed: torch.Tensor, angles: RotaryAngles | None, batch: ForwardBatch) -> torch.Tensor:
        """What the heads give, `[rows, inner]`, of normed rows `[rows, width]`, which aren't written.

        Steps are limited alike in prompts and in single tokens, as in Mamba's own code; transformers limits those of prompts only.
        """
        assert batch.recurrent is not None
        config, rows = self.config, normed.shape[0]
        inner, shared, heads = config.num_heads * config.head_dim, config.num_groups * config.state_dim, config.num_heads
        gate, convolved, step = self.inputs(normed).split_with_sizes([inner, inner + 2 * shared, heads], dim=1)
        states = batch.recurrent.rows_of(layer, rows)
        mixed = silu(causal_conv(states, 0, convolved, self.conv, self.conv_bias)).float()
        values, write, read = mixed.split_with_sizes([inner, shared, shared], dim=1)
        values = values.reshape(rows, heads, -1)
        write, read = (
            part.view(rows, config.num_groups, -1).repeat_interleave(heads // config.num_groups, dim=1) for part in (write, read)
        )
        step = softplus(step.float() + self.step_bias).clamp(*config.step_limits)
        out = state_space(states, 1, read, write, values * step[..., None], step * -self.log_decay.exp())
        out = out.add_(values * self.skip[:, None]).to(normed.dtype).flatten(1)
        return self._normed(out.float() * silu(gate.float())).to(normed.dtype) * self.norm

    def _normed(self, states: torch.Tensor) -> torch.Tensor:
        """Each group by itself, in float32."""
        grouped = states.view(len(states), self.config.num_groups, -1)
        return (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.norm_eps)).flatten(1)


def read_mamba(reader: WeightReader, config: DecoderConfig, mamba: MambaConfig, prefix: str) -> Mamba2:
    """Of the layer whose modules begin with `prefix`."""
    heads, inner, width = mamba.num_heads, mamba.num_heads * mamba.head_dim, config.model.hidden_size
    channels = inner + 2 * mamba.num_groups * mamba.state_dim

    def of_heads(name: str) -> torch.Tensor:
        return reader.tensor((heads,), [f"{prefix}.{name}"], dtype=torch.float32)

    state = StatePart((heads, mamba.state_dim, mamba.head_dim), torch.float32)
    return Mamba2(
        mamba,
        LayerRecurrent((StatePart((mamba.num_taps - 1, channels), reader.dtype), state)),
        inputs=reader.linear([f"{prefix}.in_proj"], [inner + channels + heads], width, bias=mamba.bias),
        conv=reader.tensor((channels, 1, mamba.num_taps), [f"{prefix}.conv1d.weight"]).squeeze(1),
        conv_bias=reader.tensor((channels,), [f"{prefix}.conv1d.bias"]) if mamba.conv_bias else None,
        log_decay=of_heads("A_log"),
        step_bias=of_heads("dt_bias"),
        skip=of_heads("D"),
        norm=reader.tensor((inner,), [f"{prefix}.norm.weight"]),
        norm_eps=config.norm_eps,
        output=reader.linear([f"{prefix}.out_proj"], [width], inner, bias=mamba.bias),
    )
