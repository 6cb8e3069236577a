"""The model as a pipeline over two islands.

Each stage runs on its own island and is data-parallel over the hosts of that island: the mesh axis
"dp" divides the rows of a microbatch and their activations, and every host has all parameters and
optimizer state. The compiler inserts the all-reduce of the gradients, because the parameters are
declared replicated. The runtime moves activations to the other island, and their gradients back; it
derives these transfers from the placement of the stages.

`pw.pipeline` makes one program of a training step, in the order of a schedule. The next step can
begin before the last one has ended.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.sharding import PartitionSpec as P

import pw
from examples.train_lm.corpus import Batch
from examples.train_lm.model import ModelConfig, OptimizerConfig, stage0_forward, stage1_loss


def build_pipeline(
    config: ModelConfig,
    optimizer_config: OptimizerConfig,
    islands: tuple[str, str],
    hosts_per_island: int,
    micro_batches: int,
    schedule: str | pw.Schedule = "1f1b",
) -> pw.Pipeline:
    """Allocates a slice of each island and places the two stages on them.

    Args:
        islands: names of the islands for stage 0 and stage 1.
        hosts_per_island: the number of devices of each stage, one a host.
        micro_batches: parts of a batch that are in different stages at the same time.
        schedule: the order of the stages' tasks.
    """
    device_set = pw.make_virtual_device_set()
    slices = [device_set.add_slice(devices=hosts_per_island, island=name) for name in islands]
    return pw.pipeline(
        [partial(stage0_forward, config), partial(stage1_loss, config)],
        meshes=[pw.Mesh(part.devices, ("dp",)) for part in slices],
        in_shardings=(P(), P("dp")),
        microbatches=micro_batches,
        schedule=schedule,
        optimizer=optimizer_config.build(),
    )


def rows(batch: Batch) -> tuple[Any, Any]:
    """The inputs and targets of a batch, one row after the other; the pipeline divides them again."""
    width = batch.inputs.shape[-1]
    return batch.inputs.reshape(-1, width), batch.targets.reshape(-1, width)
