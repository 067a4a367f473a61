"""Gated delta net (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5."""

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from engine.cache.spec import LayerRecurrent, StatePart
from engine.models.base import ForwardBatch
from engine.models.blocks.decoder_config import DecoderConfig, DeltaNetConfig
from engine.models.blocks.linear import Linear
from engine.models.blocks.norm import RMSNorm
from engine.models.blocks.ops import Ops
from engine.models.blocks.reader import HeadOrder, WeightReader
from engine.models.blocks.recurrence import causal_conv, gated_delta_rule
from engine.models.blocks.rope import RotaryAngles

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Of one layer, without the product of its output. Each key head serves several value heads."""

    config: DeltaNetConfig
    cache: LayerRecurrent
    inputs: Linear  # [2 * keys + 2 * values + 2 * value heads, width]: queries, keys, values, output gate, rates, decays
    conv: torch.Tensor  # [2 * keys + values, taps]
    log_decay: torch.Tensor  # [value heads] float32, the log of how fast a state decays
    step_bias: torch.Tensor  # [value heads] float32
    norm: RMSNorm  # [value_dim]
    output: Linear  # [width, values]
    options: None = None
    recordable: bool = False

    def mix(self, layer: int, ops: Ops, normed: torch.Tensor, angles: RotaryAngles | None, batch: ForwardBatch) -> torch.Tensor:
        """What the heads give, `[rows, values]`, of normed rows `[rows, width]`, which aren't written."""
        assert batch.recurrent is not None
        config, rows = self.config, normed.shape[0]
        heads, repeats = config.num_value_heads, config.num_value_heads // config.num_key_heads
        keys, values = config.num_key_heads * config.key_dim, heads * config.value_dim
        convolved, gate, rate, decay = self.inputs(normed).split_with_sizes([2 * keys + values, values, heads, heads], dim=1)
        states = batch.recurrent.rows_of(layer, rows)
        mixed = silu(causal_conv(states, 0, convolved, self.conv, None)).float()
        query, key, value = mixed.split_with_sizes([keys, keys, values], dim=1)
        query, key = (_unit(part.view(rows, -1, config.key_dim)).repeat_interleave(repeats, dim=1) for part in (query, key))
        out = gated_delta_rule(
            states,
            1,
            query * config.key_dim**-0.5,
            key,
            value.reshape(rows, heads, -1),
            -self.log_decay.exp() * softplus(decay.float() + self.step_bias),
            rate.sigmoid().float(),
        )
        return (self.norm(out.to(normed.dtype)) * silu(gate.float()).view(out.shape)).to(normed.dtype).flatten(1)


def _unit(states: torch.Tensor) -> torch.Tensor:
    return states * torch.rsqrt(states.square().sum(-1, keepdim=True) + _L2_EPS)


def read_delta_net(reader: WeightReader, config: DecoderConfig, net: DeltaNetConfig, prefix: str) -> GatedDeltaNet:
    """The inputs are one product, whichever way they are stored: by what they are for, or by key head (Qwen3-Next)."""
    keys, values, heads = net.num_key_heads * net.key_dim, net.num_value_heads * net.value_dim, net.num_value_heads
    channels, width = 2 * keys + values, config.model.hidden_size
    if f"{prefix}.in_proj_qkvz.weight" in reader:
        names, heights = ["in_proj_qkvz", "in_proj_ba"], [channels + values, 2 * heads]
        order = HeadOrder(_by_purpose(net), 1)
    else:
        names, heights = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], [channels, values, heads, heads]
        order = None
    state = StatePart((heads, net.key_dim, net.value_dim), torch.float32)
    return GatedDeltaNet(
        net,
        LayerRecurrent((StatePart((net.num_taps - 1, channels), reader.dtype), state)),
        inputs=reader.linear([f"{prefix}.{name}" for name in names], heights, width, order=order),
        conv=reader.tensor((channels, 1, net.num_taps), [f"{prefix}.conv1d.weight"]).squeeze(1),
        log_decay=reader.tensor((heads,), [f"{prefix}.A_log"], dtype=torch.float32),
        step_bias=reader.tensor((heads,), [f"{prefix}.dt_bias"], dtype=torch.float32),
        norm=RMSNorm(reader.tensor((net.value_dim,), [f"{prefix}.norm.weight"]), config.norm_eps),
        output=reader.linear([f"{prefix}.out_proj"], [width], values),
    )


def _by_purpose(net: DeltaNetConfig) -> list[int]:
    """The stored number of each output: they are stored by key head, each with its queries, keys, values and gates, and then each with
    its rates and decays."""
    repeats = net.num_value_heads // net.num_key_heads
    sizes = [net.key_dim, net.key_dim, repeats * net.value_dim, repeats * net.value_dim]
    order: list[int] = []
    for group in (sizes, [repeats, repeats]):
        first = len(order)
        for number, size in enumerate(group):
            begins = [first + head * sum(group) + sum(group[:number]) for head in range(net.num_key_heads)]
            order += [place for begin in begins for place in range(begin, begin + size)]
    return order
