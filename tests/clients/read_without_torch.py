"""Reads saved files with NumPy and ml_dtypes. Run by the Python of an environment without torch: `read_without_torch.py FILE…`.

Prints for each file the SHA-256 of its states as float32, row by row, as safetensors' NumPy reader sees them and, for float8, which that
reader doesn't know, as the reader of docs/file-format.md does.
"""

import hashlib
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy
from safetensors import safe_open

PAGE = Path(__file__).parents[2] / "docs" / "file-format.md"


def plain_reader() -> dict[str, object]:
    """What the first example of the page defines."""
    names: dict[str, object] = {}
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], names)
    return names


def states_of(path: str) -> numpy.ndarray:
    metadata, tensors = plain_reader()["read"](path)
    if metadata["dtype"] == "float8_e4m3fn":
        _, shape, data = tensors["hidden_states"]
        scales = numpy.frombuffer(tensors["hidden_states_scales"][2], "<f4").reshape(-1, 1, 1)
        return numpy.frombuffer(data, ml_dtypes.float8_e4m3fn).reshape(shape).astype(numpy.float32) * scales
    with safe_open(path, framework="np") as file:
        states = file.get_tensor("hidden_states")
        assert str(states.dtype) == metadata["dtype"]
        layers = json.loads(metadata["layers"])
        assert numpy.array_equal(file.get_slice("hidden_states")[:, len(layers) - 1], states[:, -1])
        return states.astype(numpy.float32)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    print(json.dumps([hashlib.sha256(states_of(path).tobytes()).hexdigest() for path in sys.argv[1:]]))
