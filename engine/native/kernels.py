"""The compiled kernels, called with tensors. `kernels.c` and `typed.h` say what each of them computes."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engine.native.compiler import NoKernels, find_library

VERSION = 2
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GATES = {"silu": "silu_gate", "swish": "silu_gate", "gelu_pytorch_tanh": "gelu_tanh_gate"}
ONLY_FLOAT32 = {"attend_chunks"}
MAX_HEAD_DIM = 512
MAX_GROUP = 12
"""Query heads per key head that fit in a tile of rows on every processor."""
_MAPS = Path("/proc/self/maps")

_Function = Callable[..., int]
_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, list[type]] = {
    "rms_norm": [_P, _P, _P, _P, _P, _F, _I, _I, _P, _T],
    "silu_gate": [_P, _I, _I, _P, _T],
    "gelu_tanh_gate": [_P, _I, _I, _P, _T],
    "rotate": [_P, _I, _P, _P, _P, _P, _F, _I, _I, _I, _P, _T],
    "attend_chunks": [_P, _I, _P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _I, _F, _F, _P, _I, _P, _T],
    "attend_decodes": [_P, _I, _P, _P, _P, _P, _I, _P, _P, _I, _I, _I, _I, _I, _F, _F, _P, _P, _T],
}


class Kernels:
    """One dtype's kernels. Tensors are of that dtype, on the CPU and contiguous unless said otherwise."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
        self._dtype = dtype
        self._threads = threads
        self.attends_chunks = dtype == torch.float32
        """Whether there is `attend_chunks`."""
        self._functions = {
            name: _bind(library, f"{name}_{DTYPES[dtype]}", arguments)
            for name, arguments in _SIGNATURES.items()
            if dtype == torch.float32 or name not in ONLY_FLOAT32
        }

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight of `[rows, width]`; a float32 `weight` is applied before the result is rounded to the dtype."""
        out = torch.empty_like(hidden)
        self._rms_norm(hidden, None, None, weight, eps, out)
        return out

    def add_and_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden + delta` and its norm."""
        total, out = torch.empty_like(hidden), torch.empty_like(hidden)
        self._rms_norm(hidden, delta, total, weight, eps, out)
        return total, out

    def gate(self, activation: str, gate_up: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up of `[rows, 2 * inner]`: gate, then up. `activation` is one of `GATES`."""
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, inner, dtype=self._dtype)
        assert gate_up.is_contiguous()
        self._functions[GATES[activation]](gate_up.data_ptr(), rows, inner, out.data_ptr(), self._threads)
        return out

    def rotate(
        self, states: torch.Tensor, cosine: torch.Tensor, signed_sine: torch.Tensor, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """As `blocks.rope.rotate`: `[rows, heads, head_dim]`, after a norm with `weight` `[heads, head_dim]` where there is one.

        The rows of `states` may lie apart; cosine and signed_sine are `[rows, 1, head_dim]`.
        """
        rows, heads, head_dim = states.shape
        assert states.stride()[1:] == (head_dim, 1)
        assert cosine.is_contiguous()
        assert signed_sine.is_contiguous()
        assert head_dim <= MAX_HEAD_DIM
        out = torch.empty(rows, heads, head_dim, dtype=self._dtype)
        self._functions["rotate"](
            states.data_ptr(),
            states.stride(0),
            cosine.data_ptr(),
            signed_sine.data_ptr(),
            *self._weights(weight),
            eps,
            rows,
            heads,
            head_dim,
            out.data_ptr(),
            self._threads,
        )
        return out

    def attend_decodes(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        tables: torch.Tensor,
        seen: tuple[torch.Tensor, torch.Tensor],
        block_size: int,
        scale: float,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Attention of one position each of `n` sequences, written to the rows `rows` `[n]` of `out`.

        query and out `[batch rows, heads, head_dim]` (rows of `query` may lie apart); cache: keys and values `[slots, kv_heads, head_dim]`;
        tables `[n, blocks]`: the block of each `block_size` positions; seen: `[n]` each, first position and end. All indices are int64.
        sinks: `[heads]` float32.
        """
        keys, values = cache
        heads, head_dim = query.shape[1:]
        assert query.stride()[1:] == (head_dim, 1)
        assert head_dim <= MAX_HEAD_DIM
        assert all(tensor.is_contiguous() for tensor in (rows, keys, values, tables, *seen, out))
        failed = self._functions["attend_decodes"](
            query.data_ptr(),
            query.stride(0),
            rows.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            seen[0].data_ptr(),
            seen[1].data_ptr(),
            rows.shape[0],
            block_size,
            heads,
            keys.shape[1],
            head_dim,
            scale,
            soft_cap or 0.0,
            _sinks(sinks, heads),
            out.data_ptr(),
            self._threads,
        )
        if failed:
            raise MemoryError("there was no memory for the attention of a step")

    def attend_chunks(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        tables: torch.Tensor,
        chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        block_size: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of several new positions each of `n` sequences, whose keys and values are in the cache already.

        query, cache, tables and out as in `attend_decodes`; chunks: `[n]` each, first row of the batch, first position, positions.
        """
        keys, values = cache
        heads, head_dim = query.shape[1:]
        assert query.stride()[1:] == (head_dim, 1)
        assert all(tensor.is_contiguous() for tensor in (keys, values, tables, *chunks, out))
        rows, starts, counts = chunks
        failed = self._functions["attend_chunks"](
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            rows.data_ptr(),
            starts.data_ptr(),
            counts.data_ptr(),
            rows.shape[0],
            block_size,
            heads,
            keys.shape[1],
            head_dim,
            scale,
            soft_cap or 0.0,
            _sinks(sinks, heads),
            window or 0,
            out.data_ptr(),
            self._threads,
        )
        assert not failed, "the shape was to be checked beforehand"

    def _rms_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        total: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        assert hidden.is_contiguous()
        assert delta is None or delta.is_contiguous()
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (hidden, delta, total)]
        self._functions["rms_norm"](*pointers, *self._weights(weight), eps, *hidden.shape, out.data_ptr(), self._threads)

    def _weights(self, weight: torch.Tensor | None) -> tuple[int | None, int | None]:
        """The weight as the kernels take it: applied after the rounding to the dtype, or before."""
        if weight is None:
            return None, None
        assert weight.is_contiguous()
        return (None, weight.data_ptr()) if weight.dtype == torch.float32 else (weight.data_ptr(), None)


def _sinks(sinks: torch.Tensor | None, heads: int) -> int | None:
    """The address of `[heads]` float32, whatever the kernels' dtype is."""
    if sinks is None:
        return None
    assert (sinks.dtype, sinks.shape) == (torch.float32, (heads,))
    assert sinks.is_contiguous()
    return sinks.data_ptr()


def load_kernels(dtype: torch.dtype, threads: int) -> Kernels:
    """Kernels for a CPU. Raises `NoKernels`, which says why, where there are none: for the dtype, the processor or the system."""
    if dtype not in DTYPES:
        raise NoKernels(f"they are not written for {str(dtype).removeprefix('torch.')}")
    path = find_library()
    _share_openmp()
    try:
        library = ctypes.CDLL(str(path))
        if _bind(library, "strata_kernels_version", [], ctypes.c_int64)() != VERSION:
            raise NoKernels(f"{path} is of another version")
        return Kernels(library, dtype, threads)
    except (OSError, AttributeError) as error:
        raise NoKernels(f"{path} could not be loaded: {error}") from error


def _share_openmp() -> None:
    """Lets the kernels use the very threads that torch computes with: a second set would fight with them for the processor."""
    try:
        # An address range, four more fields, and a path, which may hold spaces.
        mapped = {line.split(maxsplit=5)[5] for line in _MAPS.read_text().splitlines() if "libgomp" in line}
        if len(mapped) != 1:
            raise NoKernels("torch computes with threads of another kind")
        ctypes.CDLL(mapped.pop(), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NoKernels(f"torch's compute threads were not found: {error}") from error


def _bind(library: ctypes.CDLL, name: str, arguments: list[type], result: type = ctypes.c_int) -> _Function:
    function = library[name]
    function.argtypes = arguments
    function.restype = result
    return function
