"""Token batches to maps: models, head-mean attention and orders. Needs only torch and transformers."""
