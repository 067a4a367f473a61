"""A sparse MLP: each row goes through a few of many experts, which a router chooses for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import grouped_mm, linear, softmax

from engine.models.blocks.decoder_config import DecoderConfig, ExpertsConfig, Scoring
from engine.models.blocks.linear import DenseLinears, Linear
from engine.models.blocks.mlp import MLP, read_mlp
from engine.models.blocks.ops import Ops
from engine.models.blocks.reader import WeightReader

_MOST_ROWS = 2048
"""Rows that are sorted by expert at a time; more make the copies of them large and the products no faster."""
_NOT_ZERO = 1e-20
"""As DeepSeek's reference has it: a sum of sigmoids may be 0."""
_PREFIXES = ("mlp", "block_sparse_moe", "mixer", "feed_forward")
_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_STACKED_NAMES = (
    ("experts.gate_up_proj", "experts.down_proj"),
    ("experts.up_proj", "experts.down_proj"),
    ("input_linear.weight", "output_linear.weight"),
)
_HELD_ROUTER = "router"
"""As transformers 5 holds it, whatever its published name is."""


class GroupedLinear(Protocol):
    """One weight per expert."""

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can hold it."""

    def __call__(self, states: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[n, outputs]` of `[n, inputs]`, rows of one expert side by side: those of expert e end at row `ends[e]` (int32)."""


class SeparateProducts:
    """A product for each expert that has rows, on the host's own word for how many: for a CPU."""

    recordable = False

    def __init__(self, linears: Sequence[Linear], outputs: int) -> None:
        self._linears = linears
        self._outputs = outputs

    def __call__(self, states: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product, first = states.new_empty(len(states), self._outputs), 0
        for expert, end in enumerate(ends.tolist()):
            if end > first:
                product[first:end] = self._linears[expert](states[first:end])
                first = end
        return product


class GroupedProduct:
    """One kernel for all experts, which finds their rows on the device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight`: `[experts, outputs, inputs]`; `bias`: `[experts, outputs]`."""
        self._weight = weight.transpose(1, 2)
        self._bias = bias
        # In other dtypes torch loops over the experts on the host, which waits for the device.
        self.recordable = weight.device.type == "cuda" and weight.dtype == torch.bfloat16

    def __call__(self, states: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product = grouped_mm(states, self._weight, offs=ends)
        if self._bias is None:
            return product
        experts = torch.searchsorted(ends, torch.arange(len(states), dtype=ends.dtype, device=ends.device), right=True)
        return product.add_(self._bias.index_select(0, experts))


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts for rows, and their weights."""

    config: ExpertsConfig
    weight: torch.Tensor  # [experts, width]
    bias: torch.Tensor | None  # [experts]
    correction: torch.Tensor | None  # [experts] float32

    def __call__(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts `[rows, chosen]`, ascending in each row, and their weights in the rows' dtype."""
        config = self.config
        logits = linear(normed.to(self.weight.dtype), self.weight, self.bias).float()
        scores = logits.sigmoid() if config.scoring is Scoring.SIGMOID else softmax(logits, dim=-1)
        # Logits rank as their scores do, but for sigmoids that are all 1.
        ranked = logits if self.correction is None and config.num_groups == 1 else scores
        ranked = ranked if self.correction is None else ranked + self.correction
        if config.num_groups > 1:
            ranked = self._within_best_groups(ranked)
        # Ascending, so that what a row adds up doesn't hang on the order in which topk names equals.
        chosen = ranked.topk(config.num_per_token, dim=-1).indices.sort(dim=-1).values
        weights = scores.gather(-1, chosen)
        if config.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True).add_(_NOT_ZERO)
        return chosen, weights.mul(config.scale).to(normed.dtype)

    def _within_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """Experts of other groups rank last."""
        config = self.config
        groups = ranked.view(len(ranked), config.num_groups, -1)
        best = groups.topk(config.num_best, dim=-1).values.sum(dim=-1).topk(config.num_chosen_groups, dim=-1).indices
        outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
        return groups.masked_fill(outside[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True)
class SharedMLP:
    """What every row goes through beside its experts."""

    mlp: MLP
    gate: torch.Tensor | None  # [1, width]

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        out = self.mlp(ops, normed)
        return out if self.gate is None else out.mul_(linear(normed, self.gate).sigmoid_())


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """sum over a row's experts of weight * down(activation(gate(x)) * up(x)), and the shared expert's output."""

    activation: str
    router: Router
    gate_up: GroupedLinear  # [2 * intermediate, width] per expert
    down: GroupedLinear  # [width, intermediate] per expert
    shared: SharedMLP | None
    latent: tuple[Linear, Linear] | None = None  # [latent_size, width], [width, latent_size]
    rows_at_once: int = _MOST_ROWS

    @property
    def recordable(self) -> bool:
        """See `MLP`."""
        return self.gate_up.recordable

    def __call__(self, ops: Ops, normed: torch.Tensor) -> torch.Tensor:
        rows = normed if self.latent is None else self.latent[0](normed)
        chosen, weights = self.router(normed)  # [rows, k]
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(self.router.config.num_experts, device=normed.device)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        states = rows.index_select(0, order // chosen.shape[1])  # [rows * k, width]
        if self.router.config.weighs_inputs:
            states = states * weights.flatten()[order][:, None]
            weights = torch.ones_like(weights)
        states = self.down(self._gate(ops, self.gate_up(states, ends)), ends)
        of_rows = torch.empty_like(states).index_copy_(0, order, states).view(*chosen.shape, -1)
        mixed = torch.bmm(weights[:, None, :], of_rows).squeeze(1)
        if self.latent is not None:
            mixed = self.latent[1](mixed)
        return mixed if self.shared is None else mixed.add_(self.shared(ops, normed))

    def _gate(self, ops: Ops, gate_up: torch.Tensor) -> torch.Tensor:
        clamp = self.router.config.clamp
        if not self.router.config.gated:
            return ops.activate(self.activation, gate_up)
        if clamp is None:
            return ops.gate(self.activation, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return up.add_(1).mul_(gate).mul_(gate.mul(clamp.alpha).sigmoid_())


def read_sparse_mlp(reader: WeightReader, config: DecoderConfig, experts: ExpertsConfig, layer: str) -> SparseMLP:
    """Of the decoder layer whose modules begin with `layer`, by any of the names that its experts are stored with."""
    candidates = [(f"{layer}.{name}", router) for name in _PREFIXES for router in (experts.router, _HELD_ROUTER)]
    prefix, router_name = next((pair for pair in candidates if f"{'.'.join(pair)}.weight" in reader), (f"{layer}.mlp", experts.router))
    gate_up, down = _read_experts(reader, experts, experts.latent_size or config.model.hidden_size, prefix)
    router = _read_router(reader, config, experts, f"{prefix}.{router_name}", prefix)
    shared = _read_shared(reader, config, experts, prefix, layer)
    return SparseMLP(config.activation, router, gate_up, down, shared, _read_latent(reader, config, experts, prefix))


def _read_router(reader: WeightReader, config: DecoderConfig, experts: ExpertsConfig, router: str, prefix: str) -> Router:
    wide = torch.float32 if experts.wide_router else None
    weight = reader.tensor((experts.num_experts, config.model.hidden_size), [f"{router}.weight"], dtype=wide)
    bias = reader.tensor((experts.num_experts,), [f"{router}.bias"], dtype=wide) if experts.bias else None
    correction = None
    if experts.correction is not None:
        correction = reader.tensor((experts.num_experts,), [f"{prefix}.{experts.correction}"], dtype=torch.float32)
    return Router(experts, weight, bias, correction)


def _read_shared(reader: WeightReader, config: DecoderConfig, experts: ExpertsConfig, prefix: str, layer: str) -> SharedMLP | None:
    shared = experts.shared
    if shared is None:
        return None
    prefix = layer if shared.in_layer else prefix
    gate = reader.tensor((1, config.model.hidden_size), [f"{prefix}.{shared.name}_gate.weight"]) if shared.gated else None
    return SharedMLP(read_mlp(reader, config, f"{prefix}.{shared.name}", shared.intermediate_size), gate)


def _read_latent(reader: WeightReader, config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> tuple[Linear, Linear] | None:
    size, width, bias = experts.latent_size, config.model.hidden_size, config.mlp_bias
    if size is None:
        return None
    down = reader.linear([f"{prefix}.fc1_latent_proj"], [size], width, bias=bias)
    return down, reader.linear([f"{prefix}.fc2_latent_proj"], [width], size, bias=bias)


def _read_experts(reader: WeightReader, experts: ExpertsConfig, width: int, prefix: str) -> tuple[GroupedLinear, GroupedLinear]:
    """One by one, as they are published, or all in one tensor, as transformers 5 holds them and Granite publishes them."""
    count, inner = experts.num_experts, experts.intermediate_size
    heights = [inner, inner] if experts.gated else [inner]
    gate_up, down = _Group(reader, count, sum(heights), width), _Group(reader, count, width, inner)
    for first, second in _STACKED_NAMES:
        if f"{prefix}.{first}" in reader:
            gate_up.read_stacked(f"{prefix}.{first}", inputs_first=experts.inputs_first, bias=experts.bias)
            down.read_stacked(f"{prefix}.{second}", inputs_first=experts.inputs_first, bias=experts.bias)
            if experts.outputs_in_turns:
                gate_up.part_outputs()
            return gate_up.product(), down.product()
    names = next((names for names in _EXPERT_NAMES if f"{prefix}.experts.0.{names[1]}.weight" in reader), _EXPERT_NAMES[0])
    for expert in range(count):
        gate, up, out = (f"{prefix}.experts.{expert}.{name}.weight" for name in names)
        gate_up.read(expert, [gate, up] if experts.gated else [up], heights)
        down.read(expert, [out], [width])
    return gate_up.product(), down.product()


class _Group:
    """The weights of one `GroupedLinear` while they are read."""

    def __init__(self, reader: WeightReader, count: int, outputs: int, inputs: int) -> None:
        self._reader = reader
        self._outputs = outputs
        self._dense = DenseLinears(reader.dtype, reader.device)
        self._stacked: torch.Tensor | None = None
        self._biases: torch.Tensor | None = None
        if reader.device.type == "cpu":
            self._weights = [self._dense.empty(outputs, inputs) for _ in range(count)]
        else:
            self._stacked = torch.empty(count, outputs, inputs, dtype=reader.dtype, device=reader.device)
            self._weights = list(self._stacked)

    def read(self, expert: int, names: Sequence[str], heights: Sequence[int]) -> None:
        """Of one expert, stored tensors above each other."""
        self._reader.fill(self._weights[expert], names, heights)

    def read_stacked(self, name: str, *, inputs_first: bool = False, bias: bool = False) -> None:
        """Of all experts, from one stored tensor."""
        self._reader.fill_each([weight.t() if inputs_first else weight for weight in self._weights], name)
        if bias:
            self._biases = self._reader.tensor((len(self._weights), self._outputs), [f"{name}_bias"])

    def part_outputs(self) -> None:
        """Outputs that were stored in turns, of gate and up, are put one after the other."""
        for part in [*self._weights, *([] if self._biases is None else self._biases)]:
            part.copy_(torch.cat([part[::2], part[1::2]]))

    def product(self) -> GroupedLinear:
        if self._stacked is not None:
            return GroupedProduct(self._stacked, self._biases)
        biases = [None] * len(self._weights) if self._biases is None else list(self._biases)
        return SeparateProducts([self._dense.of(*pair) for pair in zip(self._weights, biases, strict=True)], self._outputs)
