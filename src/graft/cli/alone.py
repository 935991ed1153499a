"""Whether this process is the command and nothing else. Then it may fork; where others run commands in theirs (a
test, a notebook), there may be threads and a GPU, which do not live on in a forked process."""

from __future__ import annotations

from types import SimpleNamespace

process = SimpleNamespace(alone=False)  # no dataclass: this is imported before Ctrl-C is watched
