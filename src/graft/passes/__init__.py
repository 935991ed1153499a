"""Transforms: the driver, the pipeline that runs them, and the library."""
