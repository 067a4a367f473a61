"""Packed weights for tests."""

import pytest
import torch

from engine.models.blocks.linear import PackedLinears


def packed_linears(dtype: torch.dtype) -> PackedLinears:
    """Where torch says that it can't compute them there is nothing to test; where it says that it can, a failure is one."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 for this processor")
    return PackedLinears(dtype)
