"""The transforms, one a file. The file name is the transform's name."""

import graft.ops  # noqa: F401  (transforms name graft ops, so they must exist)
