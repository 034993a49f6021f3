"""The mark of tests that need XLA's compiler for GPUs."""

import pytest

from benchmarks.compiled.deviceless import missing_plugin

needs_gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=str(missing_plugin()))
