"""The configurable decoder: packed rows through the layers, the residual stream handed out after each."""

from dataclasses import replace

import torch
from torch.nn.functional import embedding

from engine.cache.spec import LayerCache
from engine.models.base import ForwardBatch
from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.blocks.norm import Norm
from engine.models.blocks.ops import Ops, TorchOps
from engine.models.blocks.rope import RotaryAngles, RotaryTable
from engine.models.weights import DecoderWeights, LayerWeights


class Decoder:
    """A causal language model over packed tokens (the `Model` protocol)."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, max_model_len: int, ops: Ops | None = None) -> None:
        """`max_model_len` is the context limit that the model runs with; positions must be below it. `ops`: torch's where None."""
        mixers = [layer.mixer for layer in weights.layers if layer.mixer is not None]
        mlps = [layer.mlp for layer in weights.layers if layer.mlp is not None]
        recordable = all(mixer.recordable for mixer in mixers) and all(mlp.recordable for mlp in mlps)
        options = [mixer.options for mixer in mixers if mixer.options is not None]
        self.config = replace(
            config.model,
            has_head=weights.head is not None,
            soft_caps=any(option.soft_cap is not None for option in options),
            has_experts=config.experts is not None,
            attention_sinks=any(option.sinks is not None for option in options),
            recordable=recordable,
        )
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._decoder = config
        self._weights = weights
        self._ops = ops or TorchOps()
        # Rounded to the model's dtype, as Gemma's reference code does: sqrt(3072) is 55.5 in bfloat16.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()
        rotary_dim = None if config.rotary is None else config.rotary.dim
        self._rotary = [
            RotaryTable(rope, config.head_dim, max_model_len, dtype=self.dtype, device=self.device, rotary_dim=rotary_dim)
            for rope in config.ropes
        ]

    def cache_layers(self) -> list[LayerCache | None]:
        """What each decoder layer keeps in the cache, in layer order; None: nothing."""
        return [None if layer.mixer is None else layer.mixer.cache for layer in self._weights.layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Residual stream after the last layer, before the final norm: `[rows_at_layer[-1], width]`, or `batch.final_rows` of it.

        Tensors handed to `batch.capture` are never written again.
        """
        last = len(batch.rows_at_layer) - 1
        hidden = self._embed(batch.token_ids)  # [rows, width]
        batch.capture(0, hidden)
        angles = [table.lookup(batch.positions) for table in self._rotary]
        for index, rows in enumerate(batch.rows_at_layer):
            if rows < hidden.shape[0]:
                hidden = hidden[:rows]
                angles = [(cos[:rows], sin[:rows]) for cos, sin in angles]
            if rows == 0:
                break
            wanted = batch.final_rows if index == last else None
            rope = self._decoder.rope_of_layer[index]
            hidden = self._layer(index, hidden, None if rope is None else angles[rope], batch, wanted)
            batch.capture(index + 1, hidden)
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state "norm" of un-normed last-layer rows: `[rows, width]`."""
        return self._ops.norm(self._weights.final_norm, hidden)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab]` in float32."""
        head = self._weights.head
        assert head is not None, "a request for text was let through to a model without a head"
        logits = head(normed).float()
        if self._decoder.logit_divisor != 1.0:
            logits = logits.div_(self._decoder.logit_divisor)
        cap = self._decoder.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = embedding(token_ids, self._weights.embedding)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def _layer(
        self, index: int, hidden: torch.Tensor, angles: RotaryAngles | None, batch: ForwardBatch, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """`wanted` rows (None: all) are computed to the end. Keys and values are always of all: later tokens look back at them."""
        layer = self._weights.layers[index]
        before = hidden if layer.before_attention is None else self._ops.norm(layer.before_attention, hidden)
        attended = None
        if layer.mixer is not None:
            mixed = layer.mixer.mix(index, self._ops, before, angles, batch)
            attended = self._added(layer.mixer.output(mixed if wanted is None else mixed.index_select(0, wanted)), layer.after_attention)
        if wanted is not None:
            hidden, before = hidden.index_select(0, wanted), before.index_select(0, wanted)
        return self._with_mlp(layer, hidden, before, attended)

    def _with_mlp(self, layer: LayerWeights, hidden: torch.Tensor, before: torch.Tensor, attended: torch.Tensor | None) -> torch.Tensor:
        """`before`: the rows as the first half has read them; `attended`: what it gave, where there is one. Neither is written."""
        if attended is None:
            middle, normed = hidden.clone(), hidden if layer.before_mlp is None else self._ops.norm(layer.before_mlp, hidden)
        elif self._decoder.parallel:
            middle, normed = hidden + attended, before
        elif layer.before_mlp is None:
            middle = normed = hidden + attended
        else:
            middle, normed = self._ops.add_and_norm(hidden, attended, layer.before_mlp)
        if layer.mlp is None:
            return middle
        for low in range(0, middle.shape[0], layer.mlp.rows_at_once):
            rows = slice(low, low + layer.mlp.rows_at_once)
            # In place: nobody outside has seen the first sum.
            middle[rows].add_(self._added(layer.mlp(self._ops, normed[rows]), layer.after_mlp))
        return middle

    def _added(self, out: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What a sublayer adds to the residual stream, of what it gave."""
        added = out if norm is None else self._ops.norm(norm, out)
        return added if self._decoder.residual_scale == 1.0 else added.mul_(self._decoder.residual_scale)
