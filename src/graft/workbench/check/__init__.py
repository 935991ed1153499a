"""The review of a transform as a program: a list that is checked, a baseline, a search for what is wrong, a note."""

from graft.workbench.check.all_models import check_all
from graft.workbench.check.baseline import BaselineChange
from graft.workbench.check.bisect import Bisection
from graft.workbench.check.checklist import check
from graft.workbench.check.line import CheckLine
from graft.workbench.check.request import CheckRequest
from graft.workbench.check.results import CheckReport, TransformCheck

__all__ = [
    "BaselineChange",
    "Bisection",
    "CheckLine",
    "CheckReport",
    "CheckRequest",
    "TransformCheck",
    "check",
    "check_all",
]
