"""The table of dtypes says what numpy and JAX say."""

from __future__ import annotations

import pytest
from jax._src.interpreters import mlir

from pw.core.dtypes import BY_MLIR, BY_XLA, DTYPES
from pw.core.sharding import dtype_of
from tests.stages.jax_releases import NOT_LOWERED


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_has_the_names_that_the_others_use(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype_of(name).name == name
    assert BY_MLIR[dtype.mlir] == name
    assert not dtype.xla or BY_XLA[dtype.xla] == name
    with mlir.make_ir_context():
        if name not in NOT_LOWERED:
            assert str(mlir.dtype_to_ir_type(dtype_of(name))) == dtype.mlir
