"""Several processes that compute one model: their group, their messages, and how they are started and ended."""
