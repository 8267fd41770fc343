"""One process of two that build a feature cache: FOLDER PORT PROCESS alone|together."""

import sys

import jax
import numpy as np
from toy_run import make_target, make_texts

from specjax import feature_cache, sharding
from specjax.sharding import MeshShape


def main(folder: str, port: str, process: str, how: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    pretrained, texts, done = make_target(), make_texts(rows=9), []
    mesh = MeshShape(data=1, tensor=jax.device_count()).make()
    if how == "together":
        placed = sharding.place(pretrained.params, mesh)
        pretrained = type(pretrained)(**vars(pretrained) | {"params": placed})
    with sharding.use(mesh if how == "together" else None):
        cache = feature_cache.cache_features(
            folder, pretrained, (-1,), texts, 2, done.append, shard_bytes=1
        )
        batch = cache.batch(texts, np.arange(8), mesh)
    print(done, float(jax.numpy.sum(batch.hidden)))


if __name__ == "__main__":
    main(*sys.argv[1:])
