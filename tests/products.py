"""Packed weights for tests, where this torch has them."""

import pytest
import torch

from engine.errors import ConfigError
from engine.models.linear import PackedLinears


def packed_linears(dtype: torch.dtype) -> PackedLinears:
    try:
        return PackedLinears(dtype)
    except ConfigError as error:
        pytest.skip(str(error))
