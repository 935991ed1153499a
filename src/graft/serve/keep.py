"""The life of the engine process: load, a first request, and anew where it died and is to be started again."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

from graft.base.errors import EngineFailed, EngineGone, GraftError, ModelNotLoaded, UsageError
from graft.engine.params import SamplingParams
from graft.serve.keys import ApiKeys
from graft.serve.link import EngineLink
from graft.serve.logs import ServerLog
from graft.serve.metrics import Metrics
from graft.serve.options import ServeOptions
from graft.serve.state import ServerState
from graft.serve.text import ServedText, import_templates
from graft.serve.wire import ServedModel

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before an engine process that died is started again


class EngineKeeper:
    """One engine and what serves it, whoever listens: a server of its own, or a replica of an application."""

    def __init__(self, options: ServeOptions) -> None:
        self.options, metrics, self.log = options, Metrics(), ServerLog(options.json_logs)
        self.link = EngineLink(options, metrics, self.log)
        keys = ApiKeys(options.api_key, options.api_key_file)
        self.state = ServerState(options, self.link, metrics, keys, self.log)
        self.over = asyncio.Event()  # set when the process is to end
        self.warming: asyncio.Task[None] | None = None
        self.was_ready = False

    def told_ready(self, model: ServedModel) -> None:
        """The engine has answered its first request."""
        self.log("ready", model=self.options.names[0], max_model_len=model.context)

    async def keep_engine(self) -> None:
        """Until the server ends. Raises where the first process cannot load the model, or answers nothing."""
        pause = FIRST_PAUSE
        asyncio.get_running_loop().run_in_executor(None, import_templates)
        while True:
            how = await self.link.run(self.on_loaded)
            self.state.warm = False
            if self.state.draining:
                self.over.set()
                return
            why = self.link.failed[0] if self.link.failed else how
            if not self.was_ready:
                when = "while it loaded" if self.link.model is None else "over its first request"
                raise ModelNotLoaded(*self.link.failed or (f"the engine process {how} {when}", 1))
            self.log("engine died", reason=why, restart=self.options.restart)
            if not self.options.restart:
                await self.over.wait()
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE) if self.link.failed else FIRST_PAUSE
            self.state.metrics.restarts += 1

    def on_loaded(self) -> None:
        self.warming = asyncio.create_task(self.warm_up())

    async def warm_up(self) -> None:
        """Ready is who has answered: a first request, through the engine."""
        model = self.link.model
        assert model is not None
        try:
            self.state.text = await asyncio.to_thread(
                ServedText, model, self.options.tool_call_parser, self.options.reasoning_parser
            )
            if model.runner == "generate":
                with suppress(UsageError):  # where there can be no grammar, whoever asks for one is told
                    await asyncio.to_thread(self.state.text.read_vocabulary)
            params = SamplingParams(max_tokens=max(min(2, model.context - 1), 1), ignore_eos=True)
            ticket = self.link.submit([[0]], [params], follow=False)
            while ticket.left or ticket.rows:
                for _, row in await ticket.read():
                    if row.error:
                        raise EngineFailed(f"its first request failed: {row.error}")
        except EngineGone:  # keep_engine sees that too, and tells it
            return
        except GraftError as error:
            self.link.failed, self.link.model = (str(error), error.exit_code), None
            await self.link.stop()
            return
        gc.collect()
        gc.freeze()  # what is there now stays: a full collection of it takes 50 ms, in which nobody is served
        self.state.warm = self.was_ready = True
        self.told_ready(model)
