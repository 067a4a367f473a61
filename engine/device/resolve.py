"""Which device and which dtype to compute in."""

from pathlib import Path

import torch

from engine.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPUINFO = Path("/proc/cpuinfo")
_NATIVE_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` and so on, as settings and files write it."""
    return str(dtype).removeprefix("torch.")


def resolve_device(name: str) -> torch.device:
    """`auto` takes the first GPU where there is one. Raises `ConfigError` for a device that isn't there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device: cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"--device {name!r} is not there: {count} CUDA devices were found")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ConfigError(f"--device {name!r} is not supported: cpu, cuda or cuda:N")
    return device


def use_device(device: torch.device) -> None:
    """Makes it the calling thread's current one, which libraries launch their kernels on whatever device the tensors are on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def resolve_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's, but float32 on a CPU that would have to emulate the checkpoint's."""
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"--dtype {name!r} is not supported: {', '.join(_DTYPES)} or auto")
        return _DTYPES[name]
    if device.type != "cpu":
        return checkpoint
    return torch.bfloat16 if checkpoint == torch.bfloat16 and multiplies_bfloat16() else torch.float32


def multiplies_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this processor has instructions for bfloat16 products."""
    return bool(_NATIVE_BFLOAT16_FLAGS & cpu_flags(cpuinfo))


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """What the processor can do, in the kernel's words; nothing where it doesn't say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.split(":", 1)[1] for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.split())
