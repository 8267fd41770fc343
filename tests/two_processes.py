"""One process of a run of two, for `test_distributed`: `specjax ARGS`.

Prints, as its last line, which rows of its batches it read.
"""

import json
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)

from specjax import cli, sharding  # noqa: E402

load, read_rows = sharding.load, []


def recorded(mesh, shape, read):
    def reading(part):
        read_rows.extend(range(shape[0])[part])
        return read(part)

    return load(mesh, shape, reading)


sharding.load = recorded
cli.main(sys.argv[1:])
print(json.dumps({"rows": sorted(set(read_rows))}))
