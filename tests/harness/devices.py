"""What a test of tensors runs on: the CPU always, a GPU where pytest is asked for those tests."""

from __future__ import annotations

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
