"""Maps to Zarr and back: create, write a partition, finish, open, verify."""
