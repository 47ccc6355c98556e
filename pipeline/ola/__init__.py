"""Token batches to maps: models, head-mean attention and orders. Needs only torch, transformers and jaxtyping."""
