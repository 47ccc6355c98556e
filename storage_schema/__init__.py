"""What is on disk: formats, names and errors, without torch, transformers, zarr or prefect."""
