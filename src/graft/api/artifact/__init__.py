"""Saved modules: a folder that holds graph, weights, state, alias map and report, and loads in a new process."""

from graft.api.artifact.format import Artifact, SavedGraph
from graft.api.artifact.load import read_artifact
from graft.api.artifact.save import write_artifact

__all__ = ["Artifact", "SavedGraph", "read_artifact", "write_artifact"]
