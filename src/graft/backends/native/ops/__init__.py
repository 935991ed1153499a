"""How ops become steps: one file for each kind. Importing this package fills `plan.LOWERINGS`."""

from graft.backends.native.ops import attention, experts, latent, linear, norms, pointwise, rows, views

__all__ = ["attention", "experts", "latent", "linear", "norms", "pointwise", "rows", "views"]
