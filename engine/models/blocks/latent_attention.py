"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1): the cache holds one low-rank latent per token for all heads."""

from dataclasses import dataclass

import torch

from engine.cache.spec import LayerKV
from engine.models.base import AttentionOptions, ForwardBatch
from engine.models.blocks.decoder_config import DecoderConfig, LatentConfig
from engine.models.blocks.linear import Linear
from engine.models.blocks.norm import RMSNorm
from engine.models.blocks.ops import Ops
from engine.models.blocks.reader import HeadOrder, WeightReader, read_norm_weight
from engine.models.blocks.rope import RotaryAngles


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Of one layer, without the product of its output.

    A head's keys are `latent @ key_up[head].T`, so its scores are those of `query @ key_up[head]` with the latents themselves; and what
    the heads mix are latents, which `value_up` turns into values afterwards (the paper's appendix C). So all heads read the same
    keys, `[latent, rotated part]`, whose first `rank` numbers are the values.
    """

    num_heads: int
    config: LatentConfig
    options: AttentionOptions
    query_down: tuple[Linear, RMSNorm] | None  # [query_rank, width]; None: queries are made of the rows themselves
    query: Linear  # [heads * (plain_dim + rotary_dim), query_rank or width]
    latent: Linear  # [rank + rotary_dim, width]
    latent_norm: RMSNorm  # [rank]
    key_up: torch.Tensor  # [heads, plain_dim, rank]
    value_up: torch.Tensor  # [heads, rank, value_dim]
    output: Linear  # [width, heads * value_dim]
    recordable: bool = True

    @property
    def cache(self) -> LayerKV:
        """What the layer keeps."""
        return LayerKV(1, self.config.rank + self.config.rotary_dim, self.options.window, value_dim=self.config.rank)

    def mix(self, layer: int, ops: Ops, normed: torch.Tensor, angles: RotaryAngles | None, batch: ForwardBatch) -> torch.Tensor:
        """What the heads give, `[rows, heads * value_dim]`, of normed rows `[rows, width]`, which aren't written."""
        rows, rank, plain = normed.shape[0], self.config.rank, self.config.plain_dim
        queries = self.query(self._query_input(ops, normed)).view(rows, self.num_heads, -1)
        latent = self.latent(normed)
        rotated = ops.rotate(
            torch.cat([queries[..., plain:], latent[:, None, rank:]], dim=1), angles, None
        )  # [rows, heads + 1, rotary_dim]
        on_latents = torch.bmm(queries[..., :plain].transpose(0, 1), self.key_up).transpose(0, 1)  # [rows, heads, rank]
        query = torch.cat([on_latents, rotated[:, :-1]], dim=-1)
        key = torch.cat([ops.norm(self.latent_norm, latent[:, :rank].contiguous())[:, None], rotated[:, -1:]], dim=-1)
        mixed = batch.attention.attend(layer, query, key, key[..., :rank], self.options)  # [rows, heads, rank]
        return torch.bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1)

    def _query_input(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        if self.query_down is None:
            return normed
        down, norm = self.query_down
        return ops.norm(norm, down(normed))


def read_latent_attention(reader: WeightReader, config: DecoderConfig, latent: LatentConfig, index: int, prefix: str) -> LatentAttention:
    """Of decoder layer `index`."""
    width, heads, bias = config.model.hidden_size, config.num_heads, config.output_bias
    head = latent.plain_dim + latent.rotary_dim
    query_down = None
    if latent.query_rank is not None:
        norm = RMSNorm(read_norm_weight(reader, config, f"{prefix}.q_a_layernorm", latent.query_rank), latent.norm_eps)
        query_down = reader.linear([f"{prefix}.q_a_proj"], [latent.query_rank], width, bias=bias), norm
    query = reader.linear(
        [f"{prefix}.q_proj" if query_down is None else f"{prefix}.q_b_proj"],
        [heads * head],
        latent.query_rank or width,
        order=_order(config, latent.plain_dim, heads),
    )
    up = reader.tensor((heads * (latent.plain_dim + latent.value_dim), latent.rank), [f"{prefix}.kv_b_proj.weight"])
    key_up, value_up = up.view(heads, -1, latent.rank).split_with_sizes([latent.plain_dim, latent.value_dim], dim=1)
    return LatentAttention(
        heads,
        latent,
        AttentionOptions(config.attention_scale, config.windows[index]),
        query_down,
        query,
        latent=reader.linear(
            [f"{prefix}.kv_a_proj_with_mqa"], [latent.rank + latent.rotary_dim], width, bias=bias, order=_order(config, latent.rank, 1)
        ),
        latent_norm=RMSNorm(read_norm_weight(reader, config, f"{prefix}.kv_a_layernorm", latent.rank), latent.norm_eps),
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        output=reader.linear([f"{prefix}.o_proj"], [width], heads * latent.value_dim, bias=bias),
    )


def _order(config: DecoderConfig, plain_dim: int, num_heads: int) -> HeadOrder | None:
    """Of heads whose rotated dimensions come behind `plain_dim` others."""
    rotary = None if config.rotary is None else config.rotary.order(config.head_dim)
    return None if rotary is None else HeadOrder([*range(plain_dim), *(plain_dim + place for place in rotary)], num_heads)
