"""Fusions that are found, written, checked, measured and kept, or not, without anybody's help."""

from graft.workbench.autofuse.ledger import CandidateOutcome, Ledger
from graft.workbench.autofuse.request import AutofuseRequest, read_budget
from graft.workbench.autofuse.run import autofuse

__all__ = ["AutofuseRequest", "CandidateOutcome", "Ledger", "autofuse", "read_budget"]
