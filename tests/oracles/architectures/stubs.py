"""Stand-ins for optional packages that transformers needs to build parts of a model without text FFNs."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers.models.layoutlmv2 import modeling_layoutlmv2


class _Backbone(nn.Module):
    """Returns as many image features as LayoutLMv2 takes, all zero."""

    cfg = SimpleNamespace(MODEL=SimpleNamespace(PIXEL_MEAN=(), PIXEL_STD=()))

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shape = config.image_feature_pool_shape
        self.pixel_mean, self.pixel_std = torch.empty(0, 1, 1), torch.empty(0, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [images, …] to zeros [images, places, features]."""
        high, wide, features = self.shape
        return images.new_zeros(len(images), high * wide, features)


@contextmanager
def stubbed(model_type: str) -> Iterator[None]:
    """Replace LayoutLMv2's image backbone, which detectron2 would create, while inside."""
    if model_type != "layoutlmv2":
        yield
        return
    nothing = SimpleNamespace(layers=SimpleNamespace(FrozenBatchNorm2d=()))
    with (
        patch.object(modeling_layoutlmv2, "requires_backends", lambda *_: None),
        patch.object(modeling_layoutlmv2, "LayoutLMv2VisualBackbone", _Backbone),
        patch.object(modeling_layoutlmv2, "detectron2", nothing, create=True),
    ):
        yield
