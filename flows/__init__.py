"""When and where the pipeline runs."""
