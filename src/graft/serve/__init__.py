"""`graft serve`: an OpenAI-compatible HTTP server in one process, the engine in another (extra: graft[serve]).

    clients ──HTTP──▶ app ──▶ protocol: parse, check ──▶ text: encode ──▶ link ──socket──▶ worker: LLM, driver
            ◀──SSE─── app ◀── protocol: format       ◀── text: decode ◀── link ◀──socket── one frame a step

The HTTP process imports neither torch nor the model: a step never waits for it, nor it for a step.
"""
